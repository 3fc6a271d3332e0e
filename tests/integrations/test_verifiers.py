"""Tasksets of verifiers played on engines of a run: what was sampled is what is trained on, with verifiers' reward."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verifiers", reason="verifiers is not here: make test-integrations")

from fakes.chats import write_chat_model
from fakes.engines import Script, ScriptedEngine, turn
from fakes.scripted import FirstInstance, Unwatched, make_fleet

from libra.backends.chat_format import ChatFormat
from libra.config.run import ConfigError, EnvironmentConfig, load_config
from libra.environments.calculator import Calculator
from libra.environments.registry import load_environment
from libra.environments.served import EpisodeFailedError, ServedEnvironment
from libra.loop.episode import Episode, EpisodeRequest
from libra.loop.episode_server import EpisodeServer
from libra.loop.served_rollout import ServedRollout
from libra.loop.turn_maker import TurnMaker

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = load_config(EXAMPLES / "calculator_verifiers.yaml").environment


@cache
def the_example() -> ServedEnvironment:
    return calculator()  # which imports verifiers in a process


def calculator(**options: Any) -> ServedEnvironment:
    config = EnvironmentConfig(kind="verifiers", options={**CONFIG.options, **options})
    made = load_environment(config, EXAMPLES)
    assert isinstance(made, ServedEnvironment)
    return made


class Stage:
    """Engines that play the tasks of the example as they are told, with a task's question and answer."""

    def __init__(self, directory: Path, longest: int = 150) -> None:
        write_chat_model(directory)
        self.chat, self.longest, self.logs = ChatFormat(directory), longest, directory
        self.environment: Any = the_example()
        [self.prompt] = self.environment.prompts("heldout", 1, 0)
        number = int(self.prompt.id.rpartition("-")[2])
        task = Calculator().prompts("train", 1000, seed=0)[number]  # as the example numbers them
        self.question, self.answer = task.text, task.answer

    def play(self, *texts: str, episodes: int = 1, before: Callable[[], None] = lambda: None) -> list[Episode]:
        script = Script(*(turn(self.chat.encode(text)) for text in texts))

        async def run() -> list[Episode]:
            fleet = make_fleet(FirstInstance(), ScriptedEngine("rollout-0", script))
            turns = TurnMaker(self.environment.name, self.chat.stop_token, fleet, Unwatched())
            async with EpisodeServer.open() as server, self.environment.opened(self.logs):
                before()
                rollout = ServedRollout(self.environment, self.chat, server, turns, self.longest, lambda: 0.0)
                return [
                    await rollout.episode(EpisodeRequest(f"e{number}", self.prompt, 0.0, 1.0))
                    for number in range(episodes)
                ]

        return asyncio.run(run())


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_rollout_is_an_episode_of_the_tokens_that_were_sampled(stage: Stage) -> None:
    [right, wrong] = stage.play(">1+2;", f"A{stage.answer};", "A-1;", episodes=2)
    assert right.reward == 1.0 and wrong.reward == 0.0
    assert right.tokens == stage.chat.encode(f"{stage.question}>1+2;=3;A{stage.answer};")
    sampled = [token for token, own in zip(right.tokens, right.generated, strict=True) if own]
    assert sampled == stage.chat.encode(f">1+2;A{stage.answer};")
    assert [turn.generated_tokens for turn in right.trajectory.turns] == [5, len(stage.answer) + 2]
    assert right.branches == wrong.branches == ()


def test_a_rollout_that_outgrows_the_longest_context_has_no_reward(tmp_path: Path) -> None:
    stage = Stage(tmp_path, longest=30)
    [episode] = stage.play(*[">1+2;"] * 10)
    assert episode.reward == 0.0
    assert len(episode.tokens) - 5 < 30 <= len(episode.tokens) + 3  # the turn after these was refused


BROKEN = """
import os
from calculator_verifiers import CalculatorHarness as Whole, CalculatorTaskset

__all__ = ["BrokenHarness", "CalculatorTaskset"]


class BrokenHarness(Whole):
    async def launch(self, *_, **__):
        print("about to break")
        {breaks}
"""


def play_broken(stage: Stage, monkeypatch: pytest.MonkeyPatch, breaks: str) -> str:
    """The error of a harness that does this."""
    name = f"broken_{len(breaks)}_verifiers"
    (stage.logs / f"{name}.py").write_text(BROKEN.format(breaks=breaks))
    monkeypatch.syspath_prepend(str(stage.logs))
    stage.environment = calculator(id=name, env={"agent": {"harness": {"id": name}}})
    [stage.prompt] = stage.environment.prompts("heldout", 1, 0)
    with pytest.raises(EpisodeFailedError) as failed:
        stage.play()
    return str(failed.value)


def test_a_rollout_that_fails_is_named_with_the_words_of_verifiers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = play_broken(stage, monkeypatch, "raise OSError('no sandbox')")
    assert "failed 3 times" in said and "no sandbox" in said
    assert "about to break" in (stage.logs / "verifiers.log").read_text()


def test_a_crash_of_verifiers_is_no_crash_of_the_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    said = play_broken(stage, monkeypatch, "print('out of memory', flush=True); os.abort()")
    assert said.endswith("failed 3 times: the process of verifiers ended with -6: out of memory")


def test_the_process_of_verifiers_ends_with_the_run(stage: Stage) -> None:
    [episode] = stage.play(f"A{stage.answer};")
    assert episode.reward == 1.0
    player = stage.environment._player._process
    assert player.returncode == 0  # by itself
    with pytest.raises(ProcessLookupError):
        os.killpg(player.pid, 0)


def test_an_episode_after_the_end_of_verifiers_fails_at_once(stage: Stage) -> None:
    def kill() -> None:
        os.kill(stage.environment._player._process.pid, signal.SIGKILL)

    with pytest.raises(EpisodeFailedError, match="the process of verifiers ended with -9: it said nothing"):
        stage.play(before=kill)


def test_options_that_cannot_do_are_refused() -> None:
    with pytest.raises(ConfigError, match="no_such_taskset"):
        calculator(id="no_such_taskset")
    with pytest.raises(ConfigError, match=r"has the agents .*: give an environment with one"):
        calculator(env={"id": "user_sim"})
    assert calculator(tasks=10).prompts("heldout", 2, 0)
