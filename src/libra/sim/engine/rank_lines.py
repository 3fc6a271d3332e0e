"""What each rank of a group needs for its own part of the iterations that follow, as lines in the ranks' contexts.

Invariant: a line is asked for anew only where a rank has planned, or its context has left what the line holds for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libra.sim.engine.group_cost import Graph
from libra.sim.engine.iteration_cost import UNLIMITED, DecodeBatch, IterationCost
from libra.sim.engine.speculative import Ints


class RankLines:
    """Those of all ranks of a group, with one graph."""

    __slots__ = ("_base", "_limits", "_slope", "_starts", "_versions", "cost", "graph")

    def __init__(self, graph: Graph, cost: IterationCost, count: int) -> None:
        self.graph, self.cost = graph, cost
        self._base, self._slope = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._starts, self._limits = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._versions = np.full(count, -1)

    def at(
        self, contexts: Ints, growths: Ints, versions: Ints, batches: Sequence[DecodeBatch], without: Sequence[int]
    ) -> tuple[Ints, Ints, int]:
        """(ticks, growth) of each rank but some, and for how many iterations they hold."""
        # A stretch that was cut goes back to where a line did not hold yet.
        stale = (self._versions != versions) | (contexts < self._starts) | (contexts >= self._limits)
        if without:
            stale[without] = False
        for place in np.flatnonzero(stale).tolist():
            line = self.cost.line(batches[place], int(contexts[place]))
            self._base[place], self._slope[place], self._limits[place] = line
            self._starts[place] = contexts[place]
            self._versions[place] = versions[place]
        holds = (self._limits - contexts + growths - 1) // np.maximum(growths, 1)
        holds[growths == 0] = UNLIMITED
        if without:
            holds[without] = 1
        return self._base + self._slope * contexts, self._slope * growths, int(holds.min())
