"""Where a run can be continued from: weights, optimiser and the controller's own state, as of one step.

Invariant: a checkpoint directory that has its final name is complete, and on disk. Only the newest is kept; the one
before goes when the new one is complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra.backends.grpo.trainers import Trainers, save_weights
from libra.config.run import ConfigError
from libra.records.files import writing
from libra.records.schema import Evaluation, parse_record

_STATE = "state.json"
FORMAT = 2  # state of a core replica, which the others take over from it; groups under way are in files of episodes


@dataclass(frozen=True, slots=True)
class RunState:
    """The controller's side of a checkpoint. What it says of episodes is of those that had finished by then; the groups
    under way are in the files of episodes."""

    step: int
    seconds: float  # of the reinforcement learning so far
    tracker: dict[str, Any]
    policy: dict[str, Any]
    started: Evaluation


async def save_checkpoint(directory: Path, trainers: Trainers, state: RunState) -> Path:
    """Write `checkpoint-<step>` and drop older ones. Raises `DiskError`; the checkpoint before is then still there."""
    target = directory / f"checkpoint-{state.step}"
    part = directory / f"{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        await save_weights(trainers, part, optimiser=True)
        with writing(part / _STATE):
            (part / _STATE).write_text(_dump(state))
        await asyncio.to_thread(_sync, part)
        with writing(target):
            part.rename(target)
        await asyncio.to_thread(_sync, directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # it takes space that somebody may need now
        raise
    for older in directory.glob("checkpoint-*"):
        if older != target:
            shutil.rmtree(older)
    return target


def can_be_resumed(directory: Path) -> bool:
    """Whether a run directory holds a complete checkpoint."""
    return bool(_complete(directory))


def latest_checkpoint(directory: Path) -> tuple[Path, RunState]:
    """The newest complete checkpoint of a run directory. Raises `ConfigError` when there is none."""
    found = _complete(directory)
    if not found:
        raise ConfigError(f"name: {directory} holds no checkpoint to resume from; start again with --overwrite")
    path = max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    state = json.loads((path / _STATE).read_text())
    if state.get("format") != FORMAT:
        raise ConfigError(f"name: {path} is of another format; start again with --overwrite")
    started = parse_record(Evaluation, json.dumps(state["started"]), str(path / _STATE))
    return path, RunState(state["step"], state["seconds"], state["tracker"], state["policy"], started)


def _complete(directory: Path) -> list[Path]:
    return [path for path in directory.glob("checkpoint-*") if path.suffix != ".part" and (path / _STATE).is_file()]


def _dump(state: RunState) -> str:
    return json.dumps(
        {
            "format": FORMAT,
            "step": state.step,
            "seconds": state.seconds,
            "tracker": state.tracker,
            "policy": state.policy,
            "started": json.loads(state.started.to_json()),
        }
    )


def _sync(directory: Path) -> None:
    """The files of a directory, and the directory itself, are on disk when this returns."""
    with writing(directory):
        for path in (*(file for file in directory.iterdir() if file.is_file()), directory):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
