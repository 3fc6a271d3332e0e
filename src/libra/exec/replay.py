"""What a journal says was true when it ended.

Invariant: a pure function of the entries. For a journal without an interrupted move it is what the controller held in
memory; a move that was under way is named, and nothing is guessed of how far it came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from libra.exec import journal
from libra.exec.moves import Move
from libra.exec.workers import IDLE, Duty, Role
from libra.plan.problem import Allocation


@dataclass(frozen=True, slots=True)
class Past:
    """`plans` are the allocations whose buckets are in force: the latest, and the one before until that is applied."""

    version: int  # of the weights
    duties: Mapping[str, Duty]  # of every worker that was given one in the last sitting
    under_way: Mapping[str, Move]  # moves whose outcome is not known, by worker
    worked: Mapping[str, Duty]  # what every worker did last when it worked, in any sitting
    plans: tuple[Allocation, ...]


def past(entries: Iterable[journal.AnyEntry]) -> Past:
    version = 0
    duties: dict[str, Duty] = {}
    under_way: dict[str, Move] = {}
    worked: dict[str, Duty] = {}
    plans: tuple[Allocation, ...] = ()
    for entry in entries:
        match entry:
            case journal.Start():
                version, duties, under_way = entry.version, {}, {}
            case journal.Plan():
                plans = (entry.wanted,) if entry.before is None else (entry.wanted, entry.before)
            case journal.Applied():
                plans = plans[:1]
            case journal.Intend():
                under_way[entry.worker] = Move(entry.worker, entry.before, entry.after)
            case journal.Done():
                duties[entry.worker] = worked[entry.worker] = under_way.pop(entry.worker).after
            case journal.Undone():
                duties[entry.worker] = worked[entry.worker] = under_way.pop(entry.worker).before
            case journal.Failed():
                del under_way[entry.worker]
                duties[entry.worker] = _gone(entry.retired)
            case journal.Lost():
                duties[entry.worker] = _gone(entry.retired)
            case journal.Step():
                version = entry.version
            case journal.Process() | journal.Dropped() | journal.Checkpoint() | journal.End():
                pass
    return Past(version, MappingProxyType(duties), MappingProxyType(under_way), MappingProxyType(worked), plans)


def _gone(retired: bool) -> Duty:
    return Duty(Role.FAILED) if retired else IDLE
