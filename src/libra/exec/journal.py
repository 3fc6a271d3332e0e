"""An append-only record of what the controller intended and what came of it.

Invariant: a committed entry is on disk before the controller acts on it; an interrupted last line is ignored on
reading, every other damaged line is an error. What the entries add up to is worked out in `past`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from libra.exec.workers import Duty
from libra.plan.problem import Allocation
from libra.records.line_file import LineFile, whole_lines


class JournalError(ValueError):
    """A journal that cannot be resumed from. The message names file and line."""


class Entry(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """Base of all entries; `kind` on disk is their tag."""


class Start(Entry, frozen=True, tag="start"):
    """A sitting begins: no worker does anything, and the weights have this version."""

    version: int


class Process(Entry, frozen=True, tag="worker"):
    worker: str
    pid: int


class Plan(Entry, frozen=True, tag="plan"):
    """The pool is to become `wanted`. `before` is what it was; None where it was nothing that works."""

    wanted: Allocation
    before: Allocation | None


class Intend(Entry, frozen=True, tag="intend"):
    worker: str
    before: Duty
    after: Duty


class Done(Entry, frozen=True, tag="done"):
    worker: str
    seconds: float


class Undone(Entry, frozen=True, tag="undone"):
    """The move failed; the worker does again what it did before."""

    worker: str
    seconds: float
    why: str


class Failed(Entry, frozen=True, tag="failed"):
    """The move failed, and the worker does nothing. `retired`: its slot is not used any more."""

    worker: str
    seconds: float
    why: str
    retired: bool


class Lost(Entry, frozen=True, tag="lost"):
    """A worker that did something went away. `retired` as above."""

    worker: str
    why: str
    retired: bool


class Applied(Entry, frozen=True, tag="applied"):
    """All moves of the plan are done."""


class Dropped(Entry, frozen=True, tag="dropped"):
    """The moves of the plan that are not done will not be made."""

    why: str


class Step(Entry, frozen=True, tag="step"):
    """The weights have this version from now on."""

    version: int


class Checkpoint(Entry, frozen=True, tag="checkpoint"):
    step: int


class End(Entry, frozen=True, tag="end"):
    """All steps are made."""

    step: int


AnyEntry = (
    Start | Process | Plan | Intend | Done | Undone | Failed | Lost | Applied | Dropped | Step | Checkpoint | End
)  # fmt: skip


class Journal:
    """JSON lines, one an entry. Raises `DiskError` where a line cannot be written."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def note(self, entry: Entry) -> None:
        """Record something that may be lost with the machine, though not with the controller."""
        self._file.append(msgspec.json.encode(entry))

    def commit(self, entry: Entry) -> None:
        """Record something that a restarted controller must know; on disk when this returns."""
        self.note(entry)
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[AnyEntry]:
    """All whole entries. Raises `JournalError` at the first damaged one."""
    decoder: msgspec.json.Decoder[AnyEntry] = msgspec.json.Decoder(AnyEntry)
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise JournalError(f"{path}:{number}: {error}; the journal is damaged, start a new run") from None
