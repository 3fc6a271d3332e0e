"""Where a run can be continued from: weights, optimiser and the controller's own state, as of one step.

Invariant: a checkpoint directory that has its final name is complete. Only the newest is kept.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libra.config import ConfigError
from libra.exec.handles import Handle
from libra.exec.messages import Done, SaveCheckpoint
from libra.report.records import Evaluation, parse_record

_STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """The controller's side of a checkpoint."""

    step: int
    seconds: float  # of the reinforcement learning so far
    tracker: dict[str, Any]
    policy: dict[str, Any]
    started: Evaluation


async def save_checkpoint(directory: Path, core: Handle, state: RunState) -> Path:
    """Write `checkpoint-<step>` and drop older ones."""
    target = directory / f"checkpoint-{state.step}"
    part = directory / f"{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    await core.ask(SaveCheckpoint(str(part.absolute()), optimiser=True), Done)
    (part / _STATE).write_text(
        json.dumps(
            {
                "format": FORMAT,
                "step": state.step,
                "seconds": state.seconds,
                "tracker": state.tracker,
                "policy": state.policy,
                "started": json.loads(state.started.to_json()),
            }
        )
    )
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    for older in directory.glob("checkpoint-*"):
        if older != target:
            shutil.rmtree(older)
    return target


def latest_checkpoint(directory: Path) -> tuple[Path, RunState]:
    """The newest complete checkpoint of a run directory. Raises `ConfigError` when there is none."""
    found = [path for path in directory.glob("checkpoint-*") if path.suffix != ".part" and (path / _STATE).is_file()]
    if not found:
        raise ConfigError(f"name: {directory} holds no checkpoint to resume from; start again with --overwrite")
    path = max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))
    state = json.loads((path / _STATE).read_text())
    if state.get("format") != FORMAT:
        raise ConfigError(f"name: {path} is of another format; start again with --overwrite")
    started = parse_record(Evaluation, json.dumps(state["started"]), str(path / _STATE))
    return path, RunState(state["step"], state["seconds"], state["tracker"], state["policy"], started)
