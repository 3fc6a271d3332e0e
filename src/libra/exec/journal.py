"""An append-only record of the controller's intentions and their outcomes, and its replay.

Invariant: a committed entry is on disk before the controller acts on it. Reading ignores an interrupted last line. The
chained checksums reveal any other damaged, missing or moved line, which is an error. The replay is a pure function of
the entries. For a journal without an interrupted move, it equals the controller's state in memory. The replay lists an
interrupted move without an assumption about its progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import msgspec

from libra.config.sealed_line import unsealed
from libra.plan.allocation import Allocation
from libra.plan.transition import IDLE, Duty, Move, Role
from libra.records.files import ChainedFile, whole_lines


class JournalError(ValueError):
    """A journal from which a run cannot resume. The message names file and line."""


class Entry(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Base of all entries. Their tag on disk is `kind`."""


class SessionStarted(Entry, frozen=True, tag="start"):
    """A session of the run begins. All workers are idle, and the weights have this version."""

    version: int


class ProcessStarted(Entry, frozen=True, tag="worker"):
    worker: str
    pid: int


class TransitionBegun(Entry, frozen=True, tag="plan"):
    """The transition to allocation `wanted` begins. `before` is the present allocation; None if the workers form
    none."""

    wanted: Allocation
    before: Allocation | None


class MoveBegun(Entry, frozen=True, tag="intend"):
    worker: str
    before: Duty
    after: Duty


class MoveDone(Entry, frozen=True, tag="done"):
    worker: str
    seconds: float


class MoveUndone(Entry, frozen=True, tag="undone"):
    """The move failed, and the worker has its earlier duty again."""

    worker: str
    seconds: float
    why: str


class MoveFailed(Entry, frozen=True, tag="failed"):
    """The move failed, and the worker is idle. If `retired`, its slot is out of use."""

    worker: str
    seconds: float
    why: str
    retired: bool


class WorkerLost(Entry, frozen=True, tag="lost"):
    """A worker with a duty is lost. If `retired`, its slot is out of use."""

    worker: str
    why: str
    retired: bool


class TransitionDone(Entry, frozen=True, tag="applied"):
    """All moves of the plan are done."""


class TransitionDropped(Entry, frozen=True, tag="dropped"):
    """The remaining moves of the plan are dropped."""

    why: str


class WeightsPublished(Entry, frozen=True, tag="step"):
    """The weights have this version from now on."""

    version: int


class CheckpointWritten(Entry, frozen=True, tag="checkpoint"):
    step: int


class RunEnded(Entry, frozen=True, tag="end"):
    """The run has made all its steps."""

    step: int


AnyEntry = (
    SessionStarted
    | ProcessStarted
    | TransitionBegun
    | MoveBegun
    | MoveDone
    | MoveUndone
    | MoveFailed
    | WorkerLost
    | TransitionDone
    | TransitionDropped
    | WeightsPublished
    | CheckpointWritten
    | RunEnded
)


class Journal:
    """Writes JSON lines, one per entry. Raises `DiskError` if a line cannot be written."""

    def __init__(self, path: Path) -> None:
        self._file = ChainedFile(path)

    def note(self, entry: Entry) -> None:
        """Record an entry that survives a crash of the controller, but possibly not of the machine."""
        self._file.append(msgspec.json.encode(entry))

    def commit(self, entry: Entry) -> None:
        """Record an entry that a restarted controller must know. It is on disk when this returns."""
        self.note(entry)
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[AnyEntry]:
    """Yield all whole entries. Raises `JournalError` at the first damaged entry, and if the file does not exist."""
    decoder: msgspec.json.Decoder[AnyEntry] = msgspec.json.Decoder(AnyEntry)
    try:
        lines = whole_lines(path)
    except OSError as error:
        raise JournalError(f"{path}: {error.strerror}; start a new run") from None
    for number, (before, line) in enumerate(pairwise([b"", *lines]), start=1):
        try:
            yield decoder.decode(unsealed(line, before))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise JournalError(f"{path}:{number}: {error}; the journal is damaged, start a new run") from None


@dataclass(frozen=True, slots=True)
class JournalReplay:
    """State at the end of the journal. `plans` are the allocations whose buckets are in force: the latest one, and also
    the previous one until the latest is applied.
    """

    version: int  # of the weights
    duties: Mapping[str, Duty]  # duty of every worker that had one in the last session
    under_way: Mapping[str, Move]  # moves in progress at the end, by worker
    worked: Mapping[str, Duty]  # last working duty of every worker, in any session
    plans: tuple[Allocation, ...]


def replay(entries: Iterable[AnyEntry]) -> JournalReplay:
    """The state after these entries. Raises `JournalError` if a move ends that has not begun."""
    try:
        return _replay(entries)
    except KeyError as error:
        raise JournalError(
            f"journal: a move of {error.args[0]} ends without a beginning; the journal is damaged, start a new run"
        ) from None


def _replay(entries: Iterable[AnyEntry]) -> JournalReplay:
    version = 0
    duties: dict[str, Duty] = {}
    under_way: dict[str, Move] = {}
    worked: dict[str, Duty] = {}
    plans: tuple[Allocation, ...] = ()
    for entry in entries:
        match entry:
            case SessionStarted():
                version, duties, under_way = entry.version, {}, {}
            case TransitionBegun():
                plans = (entry.wanted,) if entry.before is None else (entry.wanted, entry.before)
            case TransitionDone():
                plans = plans[:1]
            case MoveBegun():
                under_way[entry.worker] = Move(entry.worker, entry.before, entry.after)
            case MoveDone():
                duties[entry.worker] = worked[entry.worker] = under_way.pop(entry.worker).after
            case MoveUndone():
                duties[entry.worker] = worked[entry.worker] = under_way.pop(entry.worker).before
            case MoveFailed():
                del under_way[entry.worker]
                duties[entry.worker] = _gone(entry.retired)
            case WorkerLost():
                duties[entry.worker] = _gone(entry.retired)
            case WeightsPublished():
                version = entry.version
            case ProcessStarted() | TransitionDropped() | CheckpointWritten() | RunEnded():
                pass
    return JournalReplay(
        version, MappingProxyType(duties), MappingProxyType(under_way), MappingProxyType(worked), plans
    )


def _gone(retired: bool) -> Duty:
    return Duty(Role.FAILED) if retired else IDLE
