"""Data-parallel ranks with one clock: they begin each iteration together, and it lasts as long as the slowest needs.

Invariant: each rank decides as an engine of its own does, at the boundaries of the group's iterations; only how long
these take is the group's. A rank is looked at when its own plan ends or something comes to it, and is brought up to
date then, so that an iteration costs what happens in it, not what ranks there are. The rules are those of vLLM's
`DPEngineCoreProc` and `coordinate_batch_across_dp`: a rank without work runs a dummy batch, the lowest kind of CUDA
graph holds for all, with a graph all are padded to the largest, and the group stops only at its first iteration and at
each `sync_interval`-th.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from libra.cost.graphs import GraphKind, graph_of
from libra.sim.clock import TICKS
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.envelope import corners, scaled
from libra.sim.engine.group_cost import Graph, GroupSpec, Together
from libra.sim.engine.iteration_cost import (
    NONE_ADMITTED,
    UNLIMITED,
    Admitted,
    Chunk,
    DecodeBatch,
)
from libra.sim.engine.jump import after, count_stretch, cut, end_of, ended_by, ticks_of
from libra.sim.engine.rank_lines import RankLines
from libra.sim.engine.request import Request
from libra.sim.engine.state import EngineState, Iteration, Piece

_KINDS: tuple[GraphKind, ...] = ("NONE", "PIECEWISE", "FULL")  # from the lowest


@dataclass(slots=True, eq=False)
class _Work:
    """Stands where an engine's cost does, and notes what an iteration has: its price takes all ranks."""

    uneven: bool
    batch: DecodeBatch
    context: int = 1
    chunks: Sequence[Chunk] = ()
    admitted: Admitted = NONE_ADMITTED

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        self.batch, self.context, self.chunks = batch, context, ()
        return 1, 0, UNLIMITED

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        self.batch, self.context, self.chunks, self.admitted = batch, context, chunks, admitted
        return 1

    @property
    def tokens(self) -> int:
        return self.batch.requests * self.batch.tokens_each + sum(new for new, _ in self.chunks)

    @property
    def uniform(self) -> bool:
        """Whether all requests have the same tokens, as if all decoded."""
        return all(new == self.batch.tokens_each for new, _ in self.chunks)


@dataclass(slots=True, eq=False, repr=False)
class Rank(SimEngine):
    """An engine of a group. It is driven as any other, but `plan` says nothing of an end: that is the group's."""

    place: int = field(default=0, init=False)
    begin: int = field(default=0, init=False)  # iteration of the group with which begins what is planned
    fresh: bool = field(default=False, init=False)  # it has planned at this boundary
    dummy: bool = field(default=False, init=False)  # it has no work, and runs dummy batches
    preempts: bool = field(default=False, init=False)  # it does nothing else in this iteration
    dummies: int = field(default=0, init=False)  # dummy batches that it has run
    group: RankGroup = field(init=False)
    work: _Work = field(init=False)

    def submit(self, request: Request, now: int) -> bool:
        sooner = SimEngine.submit(self, request, now)
        self.group.unseen[request] = now
        return sooner

    def plan(self, now: int) -> None:
        """Decide what to do from this boundary on: the group says until when."""
        self.group.planning = True
        self.work.line(DecodeBatch(0), 0)
        SimEngine.plan(self, now)
        self.preempts = self.busy and not self.paused and not self.work.tokens
        self.begin = self.group.iteration
        self.group.planned(self)

    def commit(self) -> list[Request]:
        if self.dummy:
            self.dummies += self.group.iteration - self.begin
            self.dummy = self.busy = False
            return []
        return SimEngine.commit(self)

    def token_seconds(self, now: int) -> float:
        generation = self.flight.generation
        count = generation.count
        context = generation.context_after(ended_by(self, now))
        more = context + context // count if count else 1
        batch = self.batch(min(count + 1, self.config.max_num_seqs))
        return self.group.ticks_with(batch, more) / TICKS

    def stop(self, now: int) -> None:
        if self.dummy:
            self.busy = False
        self.group.bring(self)
        SimEngine.stop(self, now)


class RankGroup:
    """The clock of some ranks. `land` at its `end`, commit the ranks that it returns, call `landed`; plan ranks, and
    let it `depart`."""

    def __init__(
        self, spec: GroupSpec, ranks: Sequence[Rank], *, exact: bool, trace: Callable[[Iteration], None] | None
    ) -> None:
        count = len(ranks)
        self.spec = spec
        self.ranks = tuple(ranks)
        self.index = ranks[0].index  # among events
        self.busy = False  # until `end`
        self.due = False  # it has landed, or a rank has planned: `depart` is to be called
        self.start = self.end = 0  # ticks
        self.iteration = 0  # the next one, or the one under way
        self.unseen: dict[Request, int] = {}  # that came since the iteration under way began, and when
        self._counter = 0  # iterations since the group began to run
        self._running = self._pausing = False
        self.planning = False  # a rank does
        self._fresh: list[Rank] = []  # that have planned at this boundary
        self._opened: list[Rank] = []  # to which something came at it
        self._horizon = 0  # iteration up to which the group is under way
        self._pieces: list[Piece] = []  # of the iterations up to there
        self._bounds: list[str] = []  # what bounds each of these, where that has names
        self._bounded: Counter[str] = Counter()  # ticks of iterations that have landed, by that
        self._exact, self._trace = exact, trace
        self._noted: list[Iteration] = []  # what ranks planned, until it is known how long it takes
        # Of each rank, as of `iteration`:
        self._until = np.full(count, UNLIMITED)  # iteration with which its plan ends
        self._contexts, self._growths = np.ones(count, np.int64), np.zeros(count, np.int64)
        self._kinds, self._sizes = np.zeros(count, np.int64), np.zeros(count, np.int64)  # its own, of a graph
        self._versions = np.zeros(count, np.int64)  # of its plan
        self._batches = [DecodeBatch(1)] * count
        self._mixed: list[Rank] = []  # with prefill in the next iteration
        self._lines: dict[GraphKind, RankLines] = {}
        self._graph, self._together = Graph("NONE"), Together(((1, 0),))  # of the next iteration
        for place, rank in enumerate(ranks):
            rank.place, rank.group, rank.clock = place, self, self
            rank.work = _Work(rank.cost.uneven, DecodeBatch(1))
            rank.cost = rank.work
            if trace is not None:
                rank.trace = self._note
        config = ranks[0].config
        self._dummy = DecodeBatch(1, config.tokens_each)

    # The clock's ranks

    def bring(self, state: EngineState) -> None:
        """Count the iterations of a rank that had ended at the latest boundary, and let it know the ticks of those that
        follow."""
        rank = cast("Rank", state)
        if not rank.busy or rank.dummy or not rank.steps or rank.fresh or self._pausing:
            return
        done = self.iteration - rank.begin
        if done > 0:
            rest = rank.steps - done
            rank.steps, rank.end = done, self.start
            count_stretch(rank)
            rank.begin, rank.start, rank.steps, rank.taken = self.iteration, self.start, rest, 0
            done = 0
        rank.pieces = after(self._pieces, -done) if self.busy else [(0, self.start, UNLIMITED, 0)]

    def forward(self, state: EngineState, steps: int) -> None:
        """So many more iterations of a rank are counted; they have ended."""
        rank = cast("Rank", state)
        rank.begin += steps
        rank.pieces = after(self._pieces, rank.begin - self.iteration)

    def cut(self, state: EngineState, now: int) -> bool:
        """Let a rank decide again at the first boundary at or after `now`. True: that is sooner for the group."""
        rank = cast("Rank", state)
        if not rank.busy or self._pausing:
            return False
        if self.busy:
            steps, _ = cut([*self._pieces], self._horizon - self.iteration, now)
            return self._limit(rank, self.iteration + steps)
        if rank.fresh:
            return self._limit(rank, self.iteration + 1)
        self.bring(rank)
        if rank.dummy:
            rank.commit()
        rank.busy, rank.steps = False, 0
        self._opened.append(rank)
        return False

    def limit(self, state: EngineState, steps: int) -> bool:
        """Let a rank decide again after so many of its planned iterations. True: that is sooner for the group."""
        rank = cast("Rank", state)
        return self._limit(rank, rank.begin + steps)

    def _limit(self, rank: Rank, iteration: int) -> bool:
        if iteration < self._until[rank.place]:
            self._until[rank.place] = iteration
            if rank.steps:
                rank.steps = iteration - rank.begin
        if not self.busy or iteration >= self._horizon:
            return False
        self._horizon = iteration
        steps = iteration - self.iteration
        self._pieces = [piece for piece in self._pieces if piece[0] < steps]
        self.end = end_of(self._pieces, steps)
        return True

    def planned(self, rank: Rank) -> None:
        """A rank has planned, at the boundary that is now."""
        self.due, self.planning, rank.fresh = True, False, True
        self._fresh.append(rank)

    # Time

    def land(self) -> list[Rank]:
        """The iterations under way have ended. Returns the ranks whose plans end with them."""
        self.busy, self.due, now = False, True, self.end
        if self._pausing:
            self._pausing = False
            return list(self.ranks)
        steps = self._horizon - self.iteration
        if steps > 1:  # what came before the last of these iterations began has been seen by then
            last = end_of(self._pieces, steps - 1)
            self.unseen = {request: came for request, came in self.unseen.items() if came > last}
        if self._bounds:
            self._bounded += self._bounding(steps)
        if self._trace is not None:
            for rank in self.ranks:
                rank.pieces = after(self._pieces, max(0, rank.begin - self.iteration))
        self._contexts += self._growths * steps
        self.iteration += steps
        self._counter += steps
        self.start = now
        ended = [self.ranks[place] for place in np.flatnonzero(self._until <= self.iteration)]
        for rank in ended:
            rank.end = now
        if self._trace is not None:
            for rank in self.ranks:
                if self._until[rank.place] > self.iteration:
                    self.bring(rank)
        return ended

    def landed(self) -> None:
        """Those ranks are committed: see whether anybody still has work. What came or was given up since the iteration
        began does not count."""
        if self._running and (self._counter == 1 or self._counter % self.spec.sync_interval == 0):
            unseen = self.unseen
            if all(it in rank.leaving or it in unseen for rank in self.ranks for it in rank.unfinished):
                self._running, self._counter = False, 0
                for rank in self.ranks:
                    if rank.dummy:
                        rank.commit()
        self.unseen.clear()

    def opened(self) -> list[Rank]:
        """Ranks to which something came while others planned already: let them plan, too, before `depart`."""
        opened, self._opened = self._opened, []
        return [rank for rank in opened if not rank.fresh]

    def depart(self, now: int) -> bool:
        """All ranks that had to have planned. True: they compute something until `end`."""
        self.due = False
        fresh, self._fresh = self._fresh, []
        for rank in fresh:
            rank.fresh = False
        self.start = now
        if any(rank.closed for rank in fresh):
            self._running = False
            return False
        if any(rank.paused for rank in fresh):
            self._pausing = self.busy = True
            self.end = max(rank.end for rank in fresh)
            return True
        if not self._running:
            if not any(rank.busy for rank in fresh):
                return False
            self._running, self._counter = True, 0
            fresh = list(self.ranks)
        for rank in fresh:
            self._take(rank)
        self.unseen.clear()
        self._mixed = [rank for rank in fresh if not rank.dummy and rank.work.chunks]
        self._horizon = int(self._until.min())
        if self._exact:
            self._horizon = self.iteration + 1
        elif self._horizon == UNLIMITED:  # nobody has work
            interval = self.spec.sync_interval
            self._horizon = self.iteration + (interval - self._counter % interval if self._counter else 1)
        self._price()
        self.busy = True
        for noted in self._noted:
            assert self._trace is not None
            self._trace(replace(noted, end=self.end) if noted.end > noted.start else noted)
        self._noted.clear()
        return True

    def bounded(self, now: int) -> Counter[str]:
        """Ticks of the iterations that have ended by now, by what bounds them."""
        if not self.busy or self._pausing:
            return self._bounded
        steps, end = cut([*self._pieces], self._horizon - self.iteration, now)
        return self._bounded + self._bounding(steps if end <= now else steps - 1)

    def _bounding(self, steps: int) -> Counter[str]:
        """Of the first so many iterations under way."""
        found: Counter[str] = Counter()
        following = [before for before, *_ in self._pieces[1:]] + [steps]
        for (before, _, first, more), after_it, name in zip(self._pieces, following, self._bounds, strict=False):
            found[name] += ticks_of(max(0, min(after_it, steps) - before), first, more)
        return found

    def ticks_with(self, batch: DecodeBatch, context: int) -> int:
        """Of an iteration like the latest one, if a rank with this batch were the slowest."""
        base, slope, _ = self.spec.cost.rank(self._graph).line(batch, context)
        return max(factor * (base + slope * context) + more for factor, more in self._together.lines)

    def _take(self, rank: Rank) -> None:
        """Note what a rank has planned; if nothing, it runs dummy batches."""
        place, config, work = rank.place, rank.config, rank.work
        if rank.busy and not rank.preempts:
            self._until[place] = self.iteration + max(1, rank.steps)
        else:
            self._until[place] = self.iteration + 1 if rank.busy else UNLIMITED
            rank.dummy = rank.busy = True
            rank.steps, rank.begin = 0, self.iteration
            work.line(self._dummy, 1)
        self._batches[place] = work.batch
        self._contexts[place] = work.context
        self._growths[place] = 0 if rank.dummy else work.batch.requests
        self._versions[place] += 1
        kind, size = graph_of(
            work.tokens,
            config.capture_sizes,
            config.max_num_seqs,
            "FULL_AND_PIECEWISE",
            uniform=work.uniform,
            tokens_each=config.tokens_each,
        )
        self._kinds[place], self._sizes[place] = _KINDS.index(kind), size

    def _price(self) -> None:
        """What the iterations up to the horizon take."""
        kind, largest = _KINDS[self._kinds.min()], int(self._sizes.max())
        padded = kind != "NONE"
        tokens = largest * len(self.ranks) if padded else int(self._sizes.sum())
        self._graph = graph = Graph(kind, largest if padded else 0)
        self._together = together = self.spec.cost.together(graph, tokens, self.iteration)
        self._horizon = min(self._horizon, self.iteration + together.holds)
        lines = self._lines.get(kind)
        if lines is None or lines.graph != graph:
            lines = self._lines[kind] = RankLines(graph, self.spec.cost.rank(graph), len(self.ranks))
        steps, at, done = self._horizon - self.iteration, self.start, 0
        self._pieces, self._bounds = [], []
        while done < steps:
            contexts = self._contexts + self._growths * done
            mixed = [rank.place for rank in self._mixed]
            ticks, growth, holds = lines.at(contexts, self._growths, self._versions, self._batches, mixed)
            for rank in self._mixed:
                work = rank.work
                ticks[rank.place] = lines.cost.mixed(work.batch, work.context, work.chunks, work.admitted)
            for count, first, more, line in corners(*scaled(ticks, growth, together.lines), min(holds, steps - done)):
                self._pieces.append((done, at, first, more))
                if together.names:
                    self._bounds.append(together.names[line // len(self.ranks)])
                at += ticks_of(count, first, more)
                done += count
        self.end = at

    def _note(self, iteration: Iteration) -> None:
        assert self._trace is not None
        if self.planning:
            self._noted.append(iteration)
        else:
            self._trace(iteration)
