"""A process for each episode: what it is given, what its reward is, and that it is gone."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes.far_end import PATIENCE

from libra.config.run import ConfigError
from libra.environments.command import CommandEnvironment
from libra.environments.protocol import Prompt
from libra.environments.served import EpisodeFailedError, Seat

SEAT = Seat("http://127.0.0.1:1/v1", "e", "the key")


def environment(tmp_path: Path, program: str, tasks: str = '{"a": 1}\n' * 10, **more: Any) -> CommandEnvironment:
    (tmp_path / "tasks.jsonl").write_text(tasks)
    (tmp_path / "program.py").write_text(program)
    return CommandEnvironment([sys.executable, str(tmp_path / "program.py")], str(tmp_path / "tasks.jsonl"), **more)


def play(made: CommandEnvironment) -> float:
    [prompt] = made.prompts("heldout", 1, 0)
    return asyncio.run(made.play(prompt, SEAT))


def test_it_has_the_task_and_the_model_and_its_last_line_is_the_reward(tmp_path: Path) -> None:
    program = """
import json, os, sys
assert json.load(sys.stdin) == {"a": 1}
assert os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:1/e/v1" and os.environ["OPENAI_API_KEY"] == "the key"
print("thinking")
print(0.25)
"""
    assert play(environment(tmp_path, program)) == 0.25


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('well done')", "the last line printed is 'well done': print the reward"),
        ("print('nan')", "print the reward, a number"),
        ("", "the last line printed is ''"),
        ("import sys; sys.exit('no sandbox')", "ended with 1: no sandbox"),
    ],
)
def test_a_process_without_a_reward_fails(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(EpisodeFailedError, match=message):
        play(environment(tmp_path, program))


def test_all_that_it_started_ends_with_it(tmp_path: Path) -> None:
    program = f"""
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    with pytest.raises(EpisodeFailedError, match="took more than 2 s"):
        play(environment(tmp_path, program, seconds=2))
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + PATIENCE  # the system ends it a moment after the signal
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_every_fifth_task_is_held_out_whatever_the_seed(tmp_path: Path) -> None:
    made = environment(tmp_path, "", "".join(f"{number}\n" for number in range(20)))
    heldout, train = made.prompts("heldout", 4, 1), made.prompts("train", 16, 1)
    assert {each.text for each in [*heldout, *train]} == {str(number) for number in range(20)}
    assert set(made.prompts("heldout", 4, 2)) == set(heldout)
    assert made.prompts("train", 3, 1) == train[:3] != made.prompts("train", 3, 2)
    assert isinstance(train[0], Prompt)
    with pytest.raises(ConfigError, match=r"environment\.heldout_prompts is 5, but this split has 4 of 20 tasks"):
        made.prompts("heldout", 5, 1)


@pytest.mark.parametrize(
    ("command", "tasks", "message"),
    [
        ("python task.py", "1\n", "command is 'python task.py': give a list of words"),
        (["true"], "1\n{\n", "tasks.jsonl, line 2 is not JSON"),
        (["true"], None, "tasks.jsonl cannot be read"),
    ],
)
def test_options_that_cannot_do_are_refused(tmp_path: Path, command: Any, tasks: str | None, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    if tasks is not None:
        path.write_text(tasks)
    with pytest.raises(ValueError, match=message):
        CommandEnvironment(command, str(path))
