"""Seconds that the longest trajectories spend on engines, alone and together with others.

Invariant: every value is linear in seconds, or a maximum of such values, so a longer part never shortens a stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

Row = tuple[float, ...]  # [class]
Lines = tuple[Row, ...]  # [line][class]


@dataclass(frozen=True, slots=True)
class Stays:
    """The fields of `libra.plan.problem.EngineOption` that have these names; see the notation there."""

    residence: Row
    generates: Lines
    waits: Lines

    def lines(self, last: int) -> tuple[tuple[float, float], ...]:
        """(generates, waits) of the longest trajectory of the classes up to `last`."""
        return tuple((g[last], w[last]) for g, w in zip(self.generates, self.waits, strict=True))

    def alone(self, last: int) -> float:
        """Seconds of the longest trajectory of the classes up to `last`, if its batch had no others."""
        return max((generates + waits for generates, waits in self.lines(last)), default=0.0)

    def begun_on(self, there: Stays, recall: Sequence[Sequence[float]]) -> Stays:
        """The longest stays of trajectories that begin on the engines of `there`. `recall[router][class]` is the share
        of their work that a router sends to the engines of `self`. The other work stays on the engines of `there`.
        """
        routed = (_mixed(parts, self.residence, there.residence) for parts in recall)
        return Stays(
            tuple(map(max, zip(*routed, strict=True))),
            tuple(_mixed(parts, *pair) for parts in recall for pair in self._pairs(self.generates, there.generates)),
            tuple(_mixed(parts, *pair) for parts in recall for pair in self._pairs(self.waits, there.waits)),
        )

    def _pairs(self, mine: Lines, theirs: Lines) -> list[tuple[Row, Row]]:
        return list(zip_longest(mine, theirs, fillvalue=(0.0,) * len(self.residence)))


def least(stays: Sequence[Stays]) -> Stays:
    """Lower bound on all of `stays`, which has one or more."""

    def rows(tables: Iterable[Lines]) -> Lines:
        nothing = (0.0,) * len(stays[0].residence)
        return tuple(tuple(map(min, zip(*each, strict=True))) for each in zip_longest(*tables, fillvalue=nothing))

    return Stays(
        tuple(map(min, zip(*(it.residence for it in stays), strict=True))),
        rows(it.generates for it in stays),
        rows(it.waits for it in stays),
    )


def _mixed(parts: Sequence[float], mine: Row, theirs: Row) -> Row:
    return tuple(part * own + (1 - part) * other for part, own, other in zip(parts, mine, theirs, strict=True))
