"""What an interrupted run left, and what a run that goes on from it begins with.

Invariant: reading it changes nothing but what a kill cut off, and drops records only of steps that are replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from libra.exec.journal import JournalReplay, read_journal, replay
from libra.exec.pool import Worker, bucket_limits, current_allocation
from libra.loop.checkpoint import RunState, latest_checkpoint
from libra.loop.episode_file import History, read_history
from libra.loop.recorder import RECORDS
from libra.loop.rollout import Episode
from libra.plan.allocation import Allocation
from libra.records.disk import write_whole, writing
from libra.records.line_file import drop_partial_line, whole_lines
from libra.records.schema import DecisionRecord, PeriodRecord, Record, StepRecord, read_records


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
        """Of reinforcement learning so far."""
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
    contexts. None where there are other workers or engines by now, or none that hold the longest contexts."""
    engines = {duty.shape for duty in before.worked.values() if duty.shape is not None}
    if {worker.id for worker in workers} != set(before.worked) or not engines <= set(holds):
        return None
    longest = max(holds.values())
    holding = sorted(shape for shape in engines if holds[shape] == longest)
    if not holding:
        return None
    # While nobody held the longest contexts, others served them; and plans may no longer name a lost worker.
    limits = [(shape, min(up_to, holds[shape])) for shape, up_to in bucket_limits(before.plans) if shape in engines]
    found = current_allocation(before.worked.values(), [*limits, (holding[0], longest)], longest)
    if found is None:
        return None
    *shorter, last = found.buckets
    others = len(workers) - found.replicas - found.engines
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
