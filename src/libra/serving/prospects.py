"""Candidates of a search that are probably still to be simulated, for the time that it needs.

Invariant: prospects decide nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from libra.serving.answer import Point, rival
from libra.serving.candidate import ServingCandidate


@dataclass(frozen=True, slots=True)
class Prospect:
    """A candidate that is left, with what it promises."""

    candidate: ServingCandidate
    idle: tuple[int, int]  # TTFT and TPOT on idle engines, in tenths of their limits
    value: float  # as of `Point`


@dataclass(slots=True)
class Prospects:
    """Counts prospects that no point found so far is likely to beat."""

    _slower: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def learn(self, point: Point, idle: tuple[int, int]) -> None:
        """Note by how many tenths a point is slower at its rate than on idle engines."""
        ttft, tpot = point.tenths
        self._slower[point.candidate.architecture].append((ttft - idle[0], tpot - idle[1]))

    def due(self, prospects: Iterable[Prospect], front: Sequence[Point]) -> int:
        """The number of prospects that no point beats, if they are slower at their rate as the points are."""
        slower = {name: np.mean(its, axis=0).astype(int).tolist() for name, its in self._slower.items()}
        count = 0
        for it in prospects:
            ttft, tpot = slower.get(it.candidate.architecture, (0, 0))
            better = rival((it.idle[0] + ttft, it.idle[1] + tpot), front)
            count += better is None or better.value < it.value
        return count
