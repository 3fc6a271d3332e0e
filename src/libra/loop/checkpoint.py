"""Checkpoints of a run: weights, optimiser and the controller's state at one step.

Invariant: a checkpoint directory with its final name is complete, on disk, and was read back. The newest two are kept,
so that a run can continue from the older one if the newest is damaged.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from libra.backends.protocols import Trainer
from libra.config.run import ConfigError
from libra.config.sealed_line import opened
from libra.exec.journal import JournalReplay, read_journal, replay
from libra.exec.pool import Worker, bucket_limits, current_allocation
from libra.loop.episode import Episode
from libra.loop.episode_file import History, read_history
from libra.loop.recorder import RECORDS
from libra.plan.allocation import Allocation
from libra.records.files import drop_partial_line, whole_lines, write_whole, writing
from libra.records.manifest import MANIFEST, ManifestError, check_manifest, force_directory, seal
from libra.records.schema import (
    DecisionRecord,
    Evaluation,
    PeriodRecord,
    Record,
    RecordFormatError,
    StepRecord,
    parse_record,
    read_records,
)

_STATE = "state.json"
FORMAT = 4  # the files are listed in a manifest, and the lines of journal and episodes are chains of checksums
_NUMBERED = re.compile(r"checkpoint-(\d{1,12})")
_KEPT = 2  # checkpoints: if the newest is damaged, a run continues from the one before


@dataclass(frozen=True, slots=True)
class RunState:
    """The controller's part of a checkpoint. It covers finished episodes; the files of episodes have the groups in
    progress.
    """

    step: int
    seconds: float  # of reinforcement learning up to this step
    tracker: dict[str, Any]
    policy: dict[str, Any]
    started: Evaluation


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`RunState` in its file format."""

    format: int
    step: int
    seconds: float
    tracker: dict[str, Any]
    policy: dict[str, Any]
    started: dict[str, Any]


async def save_checkpoint(directory: Path, trainers: Trainer, state: RunState) -> Path:
    """Write `checkpoint-<step>`, read it back, and delete all older checkpoints except the previous one. Raises
    `DiskError` without deleting any checkpoint.
    """
    target = directory / f"checkpoint-{state.step}"
    part = directory / f"{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        await trainers.save(part, optimiser=True)
        with writing(part / _STATE):
            (part / _STATE).write_text(json.dumps({"format": FORMAT, **asdict(state)}))
        await asyncio.to_thread(seal, part)
        with writing(target):
            part.rename(target)
        await asyncio.to_thread(force_directory, directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # free its disk space for other files
        raise
    for older in _numbered(directory)[_KEPT:]:
        shutil.rmtree(older)
    for left in (path for end in ("part", "damaged") for path in directory.glob(f"checkpoint-*.{end}")):
        shutil.rmtree(left, ignore_errors=True)
    return target


def can_be_resumed(directory: Path) -> bool:
    """Whether a run directory has a finished checkpoint."""
    return any((path / MANIFEST).is_file() for path in _numbered(directory))


def latest_checkpoint(directory: Path, *, contents: bool = True) -> tuple[Path, RunState]:
    """The newest checkpoint of a run directory that is not damaged. Without `contents`, the check reads only the
    controller's state in full. Raises `ConfigError` if every checkpoint is damaged or missing."""
    path, state, _ = _newest(directory, contents)
    return path, state


def _newest(directory: Path, contents: bool) -> tuple[Path, RunState, dict[Path, str]]:
    """The newest undamaged checkpoint, and the fault of each newer one."""
    damaged = dict[Path, str]()
    for path in _numbered(directory):
        try:
            return path, _read_checkpoint(path, contents), damaged
        except (ManifestError, RecordFormatError) as error:
            damaged[path] = str(error)
    if damaged:
        why = next(iter(damaged.values()))
        raise ConfigError(f"name: {directory} has no complete checkpoint ({why}); start again with --overwrite")
    raise ConfigError(f"name: {directory} has no checkpoint to resume from; start again with --overwrite")


def _read_checkpoint(path: Path, contents: bool) -> RunState:
    """Read a checkpoint. Raises `ManifestError` or `RecordFormatError` if it is damaged."""
    check_manifest(path, _STATE, contents=contents)
    where = str(path / _STATE)
    try:
        saved = msgspec.convert(json.loads((path / _STATE).read_bytes()), _Saved)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise RecordFormatError(f"{where}: {error}") from None
    if saved.format != FORMAT:
        raise RecordFormatError(f"{where}: format {saved.format}, but this version of libra reads format {FORMAT}")
    if path.name != f"checkpoint-{saved.step}":
        raise RecordFormatError(f"{where}: its state is of step {saved.step}, not of the step in the directory's name")
    started = parse_record(Evaluation, json.dumps(saved.started), where)
    return RunState(saved.step, saved.seconds, saved.tracker, saved.policy, started)


def _numbered(directory: Path) -> list[Path]:
    """Directories named like finished checkpoints, the newest first."""
    found = {path: it for path in directory.iterdir() if (it := _NUMBERED.fullmatch(path.name)) and path.is_dir()}
    return sorted(found, key=lambda path: int(found[path][1]), reverse=True)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Extent of a run's records: the last step, its time, and the number of periods. `damaged` has a line for each file
    with torn lines, and says how many."""

    step: int = 0
    time: float = 0.0
    periods: int = 0
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An interrupted run, as found by `--resume`."""

    checkpoint: Path
    state: RunState
    history: History  # since the checkpoint
    journal: JournalReplay
    recorded: Recorded

    @property
    def seconds(self) -> float:
        """Seconds of reinforcement learning up to the interruption."""
        return max(self.state.seconds, self.recorded.time)


def read_interrupted(directory: Path) -> Interrupted:
    """State of an interrupted run. Adds `.damaged` to the name of each damaged checkpoint that is newer than the
    returned checkpoint. Raises `ConfigError`, `EpisodeFileError`, `JournalError` or `RecordFormatError` if the run
    cannot be resumed, and `DiskError`."""
    check_kinds(directory)
    checkpoint, state, damaged = _newest(directory, contents=True)
    history = read_history(directory, state.step)
    found = replay(read_journal(directory / "journal.jsonl"))
    recorded = cut_back(directory, history.version)
    for path in damaged:  # the resumed run writes its own checkpoint under this name
        set_aside(path)
    words = tuple(f"{why}: the run continues from {checkpoint.name}" for why in damaged.values())
    return Interrupted(checkpoint, state, history, found, replace(recorded, damaged=words + recorded.damaged))


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that `--resume` continues from the previous one; returns the new path. Raises
    `DiskError`."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    with writing(checkpoint):
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
    return aside


def check_kinds(directory: Path) -> None:
    """Check that each name in a run directory is a regular file or a directory, as a run creates it. Opening a pipe or
    a link could block for ever, or write elsewhere. Raises `ConfigError`.
    """
    for path in directory.iterdir():
        if path.suffix in (".jsonl", ".json", ".html") and not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"name: {path} is not a regular file; remove it, or start again with --overwrite")
        if path.name in ("logs", "model") and not stat.S_ISDIR(path.lstat().st_mode):
            raise ConfigError(f"name: {path} is not a directory; remove it, or start again with --overwrite")


def allocation_in_force(
    before: JournalReplay, workers: Sequence[Worker], holds: Mapping[str, int]
) -> Allocation | None:
    """Restore the allocation from the workers' last duties and the buckets in force. `holds` maps each shape to the
    tokens of its longest context.

    A lost slot gets its last duty again. An engine whose shape has no bucket any more serves the longest contexts.
    Engines on lent devices, also recalled ones, return to their bucket if they had one. Returns None if workers or
    engine shapes have changed, or if no engine can serve the longest contexts.
    """
    engines = {duty.shape for duty in before.worked.values() if duty.shape is not None}
    own = {worker.id for worker in workers if worker.lent is None}
    if not own <= set(before.worked) <= {worker.id for worker in workers} or not engines <= set(holds):
        return None
    longest = max(holds.values())
    holding = sorted(shape for shape in engines if holds[shape] == longest)
    if not holding:
        return None
    # While no engine could serve the longest contexts, other shapes did; and plans may no longer name a lost worker.
    limits = [(shape, min(up_to, holds[shape])) for shape, up_to in bucket_limits(before.plans) if shape in engines]
    found = current_allocation(before.worked.values(), [*limits, (holding[0], longest)], longest)
    lent = Counter(worker.lent for worker in workers if worker.lent is not None)
    if found is None:
        return None
    others = len(own) - found.replicas - sum(bucket.engines for bucket in found.buckets if bucket.shape not in lent)
    *shorter, last = (replace(bucket, engines=lent.get(bucket.shape, bucket.engines)) for bucket in found.buckets)
    return replace(found, buckets=(*shorter, replace(last, engines=last.engines + others)))


def cut_back(directory: Path, step: int) -> Recorded:
    """Prepare the files of an interrupted run to continue after `step`. Drops unfinished lines, lines torn by a loss of
    power (records are not forced to disk), and records of later steps. Raises `RecordFormatError` if a file is missing:
    a run makes all of them before its first checkpoint."""
    for path in (directory / f"{name}.jsonl" for name in RECORDS):
        if not path.exists():
            raise RecordFormatError(f"{path} is missing; restore it, or start again with --overwrite")
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
    """Episodes that are not in `trajectories.jsonl` yet. Raises `RecordFormatError`."""
    path, written = directory / "trajectories.jsonl", set[str]()
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            written.add(_id.decode(opened(line)).id)
        except (msgspec.DecodeError, ValueError) as error:
            raise RecordFormatError(f"{path}:{number}: {error}") from None
    return [episode for episode in episodes if episode.trajectory.id not in written]


class _Id(msgspec.Struct):
    id: str


_id = msgspec.json.Decoder(_Id)


def _keep(path: Path, records: Sequence[Record]) -> None:
    write_whole(path, b"".join(record.to_line() + b"\n" for record in records))


def _drop_torn(path: Path) -> int:
    """Drop whole lines that are not JSON objects; returns their number. Raises `RecordFormatError` at an object that
    does not match its checksum."""
    with writing(path):
        drop_partial_line(path)
    lines = whole_lines(path)
    kept = [line for number, line in enumerate(lines, start=1) if _is_object(line, f"{path}:{number}")]
    if len(kept) < len(lines):
        write_whole(path, b"".join(line + b"\n" for line in kept))
    return len(lines) - len(kept)


def _is_object(line: bytes, where: str) -> bool:
    try:
        if not isinstance(msgspec.json.decode(line), dict):
            return False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    try:
        opened(line)
    except ValueError as error:
        raise RecordFormatError(f"{where}: {error}") from None
    return True
