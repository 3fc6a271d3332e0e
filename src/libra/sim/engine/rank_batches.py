"""The batch of each rank of a group in the following iterations, and their duration.

Invariant: ticks are whole numbers, as in `GroupCost`. A rank's line is recomputed only if the rank has planned, or if
its context has left the range of the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np

from libra.cost.graphs import GraphKind, graph_of
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.envelope import corners, scaled
from libra.sim.engine.group_cost import Graph, GroupSpec, Together
from libra.sim.engine.iteration_cost import NONE_ADMITTED, UNLIMITED, Admitted, Chunk, DecodeBatch, IterationCost
from libra.sim.engine.jump import LISTED, ticks_of, uneven_ticks
from libra.sim.engine.speculative import Ints
from libra.sim.engine.state import Piece

_KINDS: tuple[GraphKind, ...] = ("NONE", "PIECEWISE", "FULL")  # from the lowest


class RankWork(NamedTuple):
    """Batch of a rank in an iteration. `context` grows by `growth` tokens with each later iteration; with drafts,
    `contexts` lists it for all planned iterations."""

    batch: DecodeBatch
    context: int = 1
    growth: int = 0
    chunks: Sequence[Chunk] = ()
    admitted: Admitted = NONE_ADMITTED
    contexts: list[int] | None = None
    missing: int = 0  # tokens that decoding requests lack, compared with `tokens_each` tokens each

    @property
    def tokens(self) -> int:
        return self.batch.requests * self.batch.tokens_each - self.missing + sum(new for new, _ in self.chunks)

    @property
    def uniform(self) -> bool:
        """Whether all requests have `tokens_each` tokens, as in a decode batch."""
        return not self.missing and all(new == self.batch.tokens_each for new, _ in self.chunks)


NOTHING = RankWork(DecodeBatch(0))


@dataclass(slots=True, eq=False)
class NotedCost:
    """Replaces an engine's cost, and only notes an iteration's batch, since the duration depends on all ranks."""

    uneven: bool
    work: RankWork = NOTHING

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        self.work = RankWork(batch, context, batch.requests)
        return 1, 0, UNLIMITED

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        self.work = RankWork(batch, context, batch.requests, chunks, admitted)
        return 1


class Stretch(NamedTuple):
    """`steps` iterations, the pieces of their ticks, and the bottleneck of each piece, if the cost names it."""

    steps: int
    pieces: list[Piece]
    bounds: list[str]
    end: int


class RankBatches:
    """The batches of all ranks of a group."""

    def __init__(self, spec: GroupSpec, config: EngineConfig, count: int) -> None:
        self._spec, self._config, self._count = spec, config, count
        self.idle = RankWork(DecodeBatch(1, config.tokens_each))  # a dummy batch
        self._works = [self.idle] * count
        self._contexts, self._growths = np.ones(count, np.int64), np.zeros(count, np.int64)
        self._kinds, self._sizes = np.zeros(count, np.int64), np.zeros(count, np.int64)  # each rank's own graph
        self._requests = np.ones(count, np.int64)
        self._cpu = np.full(count, spec.cost.host.seconds(1))
        self._tokens = np.ones(count, np.int64)  # tokens of each rank, without padding
        self._divides = np.zeros(count, np.bool_)  # whether each rank would divide its batch, by `micro_batching`
        self._versions = np.zeros(count, np.int64)
        self._mixed: set[int] = set()  # places of ranks with prefill in the next iteration
        self._drafts = config.speculative is not None
        self._done = np.zeros(count, np.int64)  # ended iterations of each rank's work
        self._lines: dict[tuple[GraphKind, bool], _Lines] = {}
        self._graph, self._together = Graph("NONE"), Together(((1, 0),))  # latest

    def put(self, place: int, work: RankWork) -> None:
        """Let a rank compute `work` from the next iteration on."""
        config = self._config
        self._works[place] = work
        self._contexts[place], self._growths[place] = work.context, work.growth
        self._requests[place] = requests = work.batch.requests + len(work.chunks)
        host = self._spec.cost.host
        self._cpu[place] = host.seconds(requests) + host.admitting(*work.admitted)
        self._versions[place] += 1
        self._done[place] = 0
        (self._mixed.add if work.chunks else self._mixed.discard)(place)
        kind, size = graph_of(
            work.tokens,
            config.capture_sizes,
            config.max_num_seqs,
            "FULL_AND_PIECEWISE",
            uniform=work.uniform,
            tokens_each=config.tokens_each,
        )
        self._kinds[place], self._sizes[place] = _KINDS.index(kind), size
        rule = self._spec.micro_batching
        if rule is not None:
            self._tokens[place] = work.tokens
            self._divides[place] = rule.wanted(work.tokens, uniform=work.uniform)

    def goes_on(self, place: int, work: RankWork) -> bool:
        """Whether a rank's present work, continued, is `work` in the iteration after the next one."""
        before = self._works[place]
        if self._drafts or before.chunks or work.chunks or before.batch != work.batch or before.growth != work.growth:
            return False
        return bool(work.context == self._contexts[place] + self._growths[place])

    def advance(self, steps: int) -> None:
        """Record that `steps` iterations have ended."""
        self._contexts += self._growths * steps
        self._done += steps

    def price(self, iteration: int, start: int, most: int) -> Stretch:
        """Find the ticks of at most `most` iterations from number `iteration` on. Stops before the group's lines
        change."""
        kind, largest = _KINDS[self._kinds.min()], int(self._sizes.max())
        padded, cost, rule = kind != "NONE", self._spec.cost, self._spec.micro_batching
        divided = rule is None or bool(self._divides.all() and rule.fills(int(self._tokens.min()), largest))
        # Micro-batches are padded even without a graph, so that all ranks have equally many tokens.
        alike = padded or (divided and rule is not None)
        tokens = largest * self._count if alike else int(self._sizes.sum())
        self._graph = graph = Graph(kind, largest if padded else 0, not divided)
        most_requests, cpu = int(self._requests.max()), float(self._cpu.max())
        self._together = together = cost.together(graph, tokens, most_requests, cpu, iteration)
        lines = self._lines.get((kind, divided))
        if lines is None or lines.graph != graph:
            lines = self._lines[kind, divided] = _Lines(graph, cost.rank(graph), self._count)
        if self._drafts:
            return self._price_each(lines, start, min(most, together.holds))
        steps, at, done = min(most, together.holds), start, 0
        pieces, bounds, mixed = list[Piece](), list[str](), sorted(self._mixed)
        while done < steps:
            contexts = self._contexts + self._growths * done
            ticks, growth, holds = lines.at(contexts, self._growths, self._versions, self._works, mixed)
            for place in mixed:
                ticks[place] = lines.mixed(self._works[place])
            for count, first, more, line in corners(*scaled(ticks, growth, together.lines), min(holds, steps - done)):
                pieces.append((done, at, first, more))
                if together.names:
                    bounds.append(together.names[line // self._count])
                at += ticks_of(count, first, more)
                done += count
        return Stretch(steps, pieces, bounds, at)

    def _price_each(self, lines: _Lines, start: int, steps: int) -> Stretch:
        """Find the ticks of each iteration separately, since contexts grow unevenly with drafts."""
        steps = min(steps, LISTED)
        own = np.zeros(steps, np.int64)
        for place, work in enumerate(self._works):
            ticks = lines.of(place, work, self._versions.item(place))
            done = self._done.item(place)
            np.maximum(own, ticks[done : done + steps] if len(ticks) > 1 else ticks, out=own)
        together = self._together
        of_lines = np.array([factor * own + more for factor, more in together.lines])
        ticks = of_lines.max(axis=0)
        ends = [start, *(start + end for end in ticks.cumsum().tolist())]
        pieces = list(zip(range(steps), ends, ticks.tolist(), repeat(0), strict=False))
        bounds = [together.names[line] for line in of_lines.argmax(axis=0).tolist()] if together.names else []
        return Stretch(steps, pieces, bounds, ends[-1])

    def ticks_with(self, batch: DecodeBatch, context: int) -> int:
        """Ticks of an iteration like the latest one, if a rank with this batch were the slowest."""
        base, slope, _ = self._spec.cost.rank(self._graph).line(batch, context)
        return max(factor * (base + slope * context) + more for factor, more in self._together.lines)


class _Lines:
    """Ticks of each rank's own part with one graph, as lines in the ranks' contexts."""

    __slots__ = ("_base", "_limits", "_of", "_slope", "_starts", "_versions", "cost", "graph")

    def __init__(self, graph: Graph, cost: IterationCost, count: int) -> None:
        self.graph, self.cost = graph, cost
        self._base, self._slope = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._starts, self._limits = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._versions = np.full(count, -1)
        self._of: list[tuple[int, Ints]] = [(-1, np.zeros(1, np.int64))] * count

    def of(self, place: int, work: RankWork, version: int) -> Ints:
        """Ticks of each planned iteration of a rank; a single entry is valid for all iterations."""
        known, ticks = self._of[place]
        if known != version:
            batch, contexts = work.batch, work.contexts
            if contexts is None and work.chunks:
                ticks = np.array([self.mixed(work)])
            else:
                ticks = np.array(uneven_ticks(self.cost, batch, contexts or [work.context]))
            self._of[place] = version, ticks
        return ticks

    def mixed(self, work: RankWork) -> int:
        return self.cost.mixed(work.batch, work.context, work.chunks, work.admitted)

    def at(
        self, contexts: Ints, growths: Ints, versions: Ints, works: Sequence[RankWork], without: Sequence[int]
    ) -> tuple[Ints, Ints, int]:
        """Ticks of each rank, their growth per iteration, and the number of iterations for which both are valid. Ranks
        in `without` are left out."""
        # After a cut, a stretch may lie before the iterations for which a line is valid.
        stale = (self._versions != versions) | (contexts < self._starts) | (contexts >= self._limits)
        if without:
            stale[without] = False
        for place in np.flatnonzero(stale).tolist():
            line = self.cost.line(works[place].batch, int(contexts[place]))
            self._base[place], self._slope[place], self._limits[place] = line
            self._starts[place] = contexts[place]
            self._versions[place] = versions[place]
        holds = (self._limits - contexts + growths - 1) // np.maximum(growths, 1)
        holds[growths == 0] = UNLIMITED
        if without:
            holds[without] = 1
        return self._base + self._slope * contexts, self._slope * growths, int(holds.min())
