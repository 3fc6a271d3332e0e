"""Logs of real agents that are not part of the repository, and how they are made ready.

Invariant: what a log says is changed only as a function here says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from libra.trajectory import Trajectory, read_trajectories

VARIABLE = "LIBRA_DATA"  # of the environment: the folder of the logs
FILES: Mapping[str, str] = {"airline": "tau_bench_airline.jsonl", "claude-code": "claude_code_sessions.jsonl"}
_BESIDE = Path(__file__).parents[3] / "shared" / "data" / "trajectories"  # beside the checkout
USER = "user"  # who is asked, in these logs, as a tool is


def folder() -> Path:
    given = os.environ.get(VARIABLE)
    return Path(given) if given else _BESIDE


def log_file(log: str) -> Path:
    """Expected path of `log`, a name of `FILES`."""
    return folder() / FILES[log]


def present(log: str) -> tuple[Path, ...]:
    """The log's file where it is there, as inputs of a cell."""
    path = log_file(log)
    return (path,) if path.is_file() else ()


def lacking() -> str | None:
    """Which logs are not there, and what to do."""
    missing = [name for log, name in FILES.items() if not present(log)]
    if not missing:
        return None
    return f"{' and '.join(missing)} not found in {folder()}: set {VARIABLE} to the folder that holds them"


def read_log(log: str) -> tuple[Trajectory, ...]:
    """Finished trajectories, in order. Raises ValueError where the file is not there."""
    path = log_file(log)
    if not path.is_file():
        raise ValueError(
            f"{FILES[log]} is not in {path.parent}: set {VARIABLE} to the folder that holds it, or name the"
            " experiments to run without routing-real"
        )
    return tuple(trajectory for trajectory in read_trajectories(path) if trajectory.finished)


def without_waits(trajectory: Trajectory) -> Trajectory:
    """The trajectory as if it were not known how long a person took to answer: in training none is asked."""
    turns = (replace(turn, tool_seconds=None) if turn.tool == USER else turn for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def halves(log: Sequence[Trajectory], seed: int) -> tuple[tuple[Trajectory, ...], tuple[Trajectory, ...]]:
    """The trajectories of a random half of the prompts, and those of the others."""
    prompts = list(dict.fromkeys(trajectory.prompt_id for trajectory in log))
    if len(prompts) < 2:
        raise ValueError(f"the log has {len(prompts)} prompts; two halves need 2 or more")
    order = np.random.default_rng(seed).permutation(len(prompts))
    chosen = {prompts[number] for number in order[: len(prompts) // 2].tolist()}
    return tuple(it for it in log if it.prompt_id in chosen), tuple(it for it in log if it.prompt_id not in chosen)
