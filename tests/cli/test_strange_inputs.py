"""Input files that are no files, or hold numbers that no machine computes with: one line, never a traceback."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from calls import CONFIG, LOG, assert_refused, libra

HUGE = "1" + "0" * 400


def readers(path: Path) -> list[tuple[object, ...]]:
    """A command for each kind of input file."""
    return [
        ("run", path),
        ("trace", "stats", path),
        ("simulate", CONFIG.with_name("engines.yaml"), "--trajectories", path),
        ("plan", path, "--model", "Qwen/Qwen3-14B", "--trajectories", LOG),
        ("explain", path),
        ("rehearse", path, "--trajectories", LOG),
        ("lend", "serve", path),
    ]


@pytest.mark.parametrize("number", range(len(readers(Path()))))
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, number: int) -> None:
    path = tmp_path / "input"
    os.mkfifo(path)
    result = libra(*readers(path)[number])
    assert_refused(result, f"{path}: Not a regular file")
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_fifo_in_place_of_a_state_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "state"
    os.mkfifo(path)
    assert_refused(libra("route", CONFIG.with_name("gateway.yaml"), "--state", path), "Not a regular file")


def test_a_trajectory_of_a_huge_number_is_refused(tmp_path: Path) -> None:
    first = json.loads(LOG.read_text().splitlines()[0])
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({**first, "prompt_tokens": int(HUGE)}) + "\n")
    assert_refused(libra("trace", "stats", path), f"{path}:1: ")


@pytest.mark.parametrize("key", ["seed", "steps", "prompts_per_step", "max_model_len", "hidden_size", "slots"])
def test_a_configuration_of_a_huge_number_is_refused(tmp_path: Path, key: str) -> None:
    text, count = re.subn(rf"\b{key}: \d+", f"{key}: {HUGE}", CONFIG.read_text())
    if not count:
        text = CONFIG.read_text() + f"{key}: {HUGE}\n"
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert_refused(libra("run", path), f"{path}: ")
