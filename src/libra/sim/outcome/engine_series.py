"""How full an engine was over time.

Invariant: rows follow each other without a gap, and each says the mean over its time, so that the mean over any
stretch of whole rows is exact however often rows were merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Means = NDArray[np.float64]
Ticks = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class EngineSeries:
    """Arrays of one entry a row, read-only. Before the first row and after the last one the engine has nothing.

    `running` and `waiting` are requests, as of the engine's latest decision; `held` are KV blocks, which between two
    decisions are taken to grow evenly.
    """

    edges: Ticks  # [rows + 1], rising: a row is from one to the next
    running: Means
    waiting: Means
    held: Means
    held_peak: Ticks  # blocks, largest at any moment of the row
    pauses: tuple[tuple[int, int], ...] = ()  # ticks of (start, end), for new weights; adjoining ones are one
    more_pauses: int = 0  # that there was no room for

    def __post_init__(self) -> None:
        for values in (self.edges, self.running, self.waiting, self.held, self.held_peak):
            values.flags.writeable = False

    def __len__(self) -> int:
        return len(self.running)

    @property
    def most_held(self) -> int:
        return int(self.held_peak.max(initial=0))

    def merged(self, count: int) -> EngineSeries:
        """Each `count` rows made into one; the last one may be of fewer."""
        if count == 1 or not len(self):
            return self
        firsts = np.arange(0, len(self), count)
        edges = np.append(self.edges[firsts], self.edges[-1])
        spans, old = np.diff(edges), np.diff(self.edges)
        running, waiting, held = (
            np.add.reduceat(values * old, firsts) / spans for values in (self.running, self.waiting, self.held)
        )
        peaks = np.maximum.reduceat(self.held_peak, firsts)
        return EngineSeries(edges, running, waiting, held, peaks, self.pauses, self.more_pauses)

    def over(self, edges: Ticks) -> tuple[Means, Means, Means]:
        """Means of (running, waiting, held) between neighbouring `edges`, which are ticks that rise."""
        return self._mean(self.running, edges), self._mean(self.waiting, edges), self._mean(self.held, edges)

    def _mean(self, values: Means, edges: Ticks) -> Means:
        if not len(self):
            return np.zeros(len(edges) - 1)
        until = np.concatenate(([0.0], np.cumsum(values * np.diff(self.edges))))
        mean: Means = np.diff(np.interp(edges, self.edges, until)) / np.diff(edges)
        return mean
