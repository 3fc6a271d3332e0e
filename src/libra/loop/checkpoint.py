"""Where a run can be continued from: weights, optimiser and the controller's own state, as of one step.

Invariant: a checkpoint directory that has its final name is complete, and on disk. Only the newest is kept; the one
before goes when the new one is complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from libra.backends.protocols import Trainer
from libra.config.run import ConfigError
from libra.exec.journal import JournalReplay, read_journal, replay
from libra.exec.pool import Worker, bucket_limits, current_allocation
from libra.loop.episode_file import History, read_history
from libra.loop.recorder import RECORDS
from libra.loop.rollout import Episode
from libra.plan.allocation import Allocation
from libra.records.files import drop_partial_line, whole_lines, write_whole, writing
from libra.records.schema import (
    DecisionRecord,
    Evaluation,
    PeriodRecord,
    Record,
    StepRecord,
    parse_record,
    read_records,
)

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


async def save_checkpoint(directory: Path, trainers: Trainer, state: RunState) -> Path:
    """Write `checkpoint-<step>` and drop older ones. Raises `DiskError`; the checkpoint before is then still there."""
    target = directory / f"checkpoint-{state.step}"
    part = directory / f"{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        await trainers.save(part, optimiser=True)
        with writing(part / _STATE):
            (part / _STATE).write_text(json.dumps({"format": FORMAT, **asdict(state)}))
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


def _sync(directory: Path) -> None:
    """The files of a directory, and the directory itself, are on disk when this returns."""
    with writing(directory):
        for path in (*(file for file in directory.iterdir() if file.is_file()), directory):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Recorded:
    """How far the records of a run go: the last step, when it ended, and how many periods there are. `damaged` says
    which files lost how many lines."""

    step: int = 0
    time: float = 0.0
    periods: int = 0
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An interrupted run, as `--resume` finds it."""

    checkpoint: Path
    state: RunState
    history: History  # since the checkpoint
    journal: JournalReplay
    recorded: Recorded

    @property
    def seconds(self) -> float:
        """Seconds of reinforcement learning so far."""
        return max(self.state.seconds, self.recorded.time)


def read_interrupted(directory: Path) -> Interrupted:
    """Raises `ConfigError`, `EpisodeFileError` or `JournalError` where the run cannot be resumed from."""
    checkpoint, state = latest_checkpoint(directory)
    history = read_history(directory, state.step)
    found = replay(read_journal(directory / "journal.jsonl"))
    return Interrupted(checkpoint, state, history, found, cut_back(directory, history.version))


def allocation_in_force(
    before: JournalReplay, workers: Sequence[Worker], holds: Mapping[str, int]
) -> Allocation | None:
    """What the workers did last, in the buckets that were in force; `holds` are the tokens that each shape holds.

    A slot that was lost does again what it did. An engine whose shape has no bucket any more is one for the longest
    contexts; of those on lent devices all are in their bucket, if there was one, whoever was away. None where there are
    other workers or engines by now, or none that hold the longest contexts."""
    engines = {duty.shape for duty in before.worked.values() if duty.shape is not None}
    own = {worker.id for worker in workers if worker.lent is None}
    if not own <= set(before.worked) <= {worker.id for worker in workers} or not engines <= set(holds):
        return None
    longest = max(holds.values())
    holding = sorted(shape for shape in engines if holds[shape] == longest)
    if not holding:
        return None
    # While nobody held the longest contexts, others served them; and plans may no longer name a lost worker.
    limits = [(shape, min(up_to, holds[shape])) for shape, up_to in bucket_limits(before.plans) if shape in engines]
    found = current_allocation(before.worked.values(), [*limits, (holding[0], longest)], longest)
    lent = Counter(worker.lent for worker in workers if worker.lent is not None)
    if found is None:
        return None
    others = len(own) - found.replicas - sum(bucket.engines for bucket in found.buckets if bucket.shape not in lent)
    *shorter, last = (replace(bucket, engines=lent.get(bucket.shape, bucket.engines)) for bucket in found.buckets)
    return replace(found, buckets=(*shorter, replace(last, engines=last.engines + others)))


def cut_back(directory: Path, step: int) -> Recorded:
    """Make the files of an interrupted run ready to go on after `step`: lines that were never finished are dropped,
    those that a loss of power left torn (records are not forced to disk), and records of later steps."""
    torn = {name: _drop_torn(directory / f"{name}.jsonl") for name in RECORDS}
    damaged = tuple(f"{name}.jsonl: {count} torn lines are left out" for name, count in torn.items() if count)
    metrics, periods, decisions = (directory / f"{name}.jsonl" for name in ("metrics", "periods", "decisions"))
    steps = [record for record in read_records(StepRecord, metrics) if record.step <= step]
    _keep(metrics, steps)
    closed = [record for record in read_records(PeriodRecord, periods) if record.last_step <= step]
    _keep(periods, closed)
    _keep(decisions, [record for record in read_records(DecisionRecord, decisions) if record.step <= step])
    number = max((record.period + 1 for record in closed), default=0)
    return Recorded(steps[-1].step, steps[-1].time, number, damaged) if steps else Recorded(damaged=damaged)


def missing_trajectories(directory: Path, episodes: Iterable[Episode]) -> list[Episode]:
    """Episodes that the run did not come to write into `trajectories.jsonl` any more."""
    written = {_id.decode(line).id for line in whole_lines(directory / "trajectories.jsonl")}
    return [episode for episode in episodes if episode.trajectory.id not in written]


class _Id(msgspec.Struct):
    id: str


_id = msgspec.json.Decoder(_Id)


def _keep(path: Path, records: Sequence[Record]) -> None:
    write_whole(path, "".join(record.to_json() + "\n" for record in records))


def _drop_torn(path: Path) -> int:
    """Leave out what is no JSON object; returns how many whole lines that were. No error where there is no file."""
    if not path.exists():
        return 0
    with writing(path):
        drop_partial_line(path)
    lines = whole_lines(path)
    kept = [line for line in lines if _is_object(line)]
    if len(kept) < len(lines):
        write_whole(path, b"".join(line + b"\n" for line in kept))
    return len(lines) - len(kept)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
