"""Data-parallel ranks with one clock: they begin each iteration together, and the slowest determines its duration.

Invariant: each rank schedules like an independent engine, at the boundaries of the group's iterations. The group only
determines how long iterations take. A rank is visited and updated only when its own plan ends or an event reaches it,
so the work per iteration does not grow with the number of ranks.

The rules are those of vLLM's `DPEngineCoreProc` and `coordinate_batch_across_dp`. A rank without work runs a dummy
batch. All ranks use the lowest kind of CUDA graph among them, and with a graph all are padded to the largest batch. The
group stops only with its first step and with each `sync_interval`-th step. With asynchronous scheduling, a step
schedules the iteration after the one that begins with it. The first step of a group at rest begins no iteration, and
takes no time. So when the group stops, an iteration is still in flight, and all ranks run it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from libra.sim.engine.group_cost import GroupSpec
from libra.sim.engine.iteration_cost import UNLIMITED
from libra.sim.engine.jump import after, count_stretch, cut, end_of, ticks_of
from libra.sim.engine.messages import Iteration
from libra.sim.engine.rank_batches import RankBatches, RankWork, Stretch
from libra.sim.engine.request import Request
from libra.sim.engine.state import EngineState, Piece

if TYPE_CHECKING:
    from libra.sim.engine.rank import Rank


class RankGroup:
    """The common clock of a group's ranks. At its `end` the caller calls `land`, commits the returned ranks and calls
    `landed`. Then it plans ranks, and calls `depart`."""

    def __init__(
        self, spec: GroupSpec, ranks: Sequence[Rank], *, exact: bool, trace: Callable[[Iteration], None] | None
    ) -> None:
        config = ranks[0].config
        self.spec = spec
        self.ranks = tuple(ranks)
        self.index = ranks[0].index  # orders the group's events among events of the same tick
        self.busy = False  # iterations, or a pause, last until `end`
        self.due = False  # iterations have landed, or a rank has planned: the caller has to call `depart`
        self.start = self.end = 0  # ticks
        self.iteration = 0  # number of the next iteration, or of the first one under way
        self.unseen: dict[Request, int] = {}  # ticks of arrival since the iteration under way began
        self.given_up: dict[Request, int] = {}  # ticks of cancellations and interruptions since then
        self.planning = False  # a rank is planning
        self.batches = RankBatches(spec, config, len(ranks))
        self._counter = 0  # steps since the group began to run
        self._running = self._pausing = False
        self._fresh: list[Rank] = []  # ranks that have planned at this boundary
        self._opened: list[Rank] = []  # ranks that an event reached at this boundary
        self._latest = 0  # tick at which the latest iteration that has landed began
        self._horizon = 0  # number of the first iteration that is not under way
        self._pieces: list[Piece] = []  # ticks of the iterations under way
        self._bounds: list[str] = []  # bottleneck of each piece; empty if the cost does not name it
        self._bounded: Counter[str] = Counter()  # ticks of iterations that have landed, by bottleneck
        self._exact, self._trace = exact, trace
        self._noted: list[Iteration] = []  # iterations planned by ranks, until their duration is known
        self._until = np.full(len(ranks), UNLIMITED)  # iteration with which each rank's plan ends
        # With asynchronous scheduling:
        self._ahead = config.async_scheduling
        self._moving = False  # an iteration that begins at this boundary is decided
        self._ends = False  # no iteration follows the one under way
        self._coming: list[tuple[Rank, RankWork]] = []  # work of ranks in the iteration after the one under way
        self._first: Stretch | None = None  # the iteration that begins at this boundary
        for place, rank in enumerate(ranks):
            rank.join(self, place)
            if trace is not None:
                rank.trace = self._note

    # The clock's ranks

    def bring(self, state: EngineState) -> None:
        """Count the iterations of a rank that had ended at the latest boundary, except the last iteration of its plan.
        Sets the rank's `pieces` for the iterations after them."""
        rank = cast("Rank", state)
        if not rank.busy or rank.dummy or not rank.steps or rank.fresh or self._pausing:
            return
        done, now = self.iteration - rank.begin, self.start
        ends = done == rank.steps  # the rank's own commit follows, at this boundary
        if ends:
            done, now = done - 1, self._latest
        if done > 0:
            rest = rank.steps - done
            rank.steps, rank.end = done, now
            count_stretch(rank)
            rank.begin, rank.start, rank.steps, rank.taken = rank.begin + done, now, rest, 0
            done = 0
        if ends:
            rank.end, rank.pieces = self.start, [(0, now, self.start - now, 0)]
        else:
            rank.pieces = after(self._pieces, -done) if self.busy else [(0, self.start, UNLIMITED, 0)]

    def forward(self, state: EngineState, steps: int) -> None:
        """Record that the rank has counted `steps` more ended iterations."""
        rank = cast("Rank", state)
        rank.begin += steps
        rank.pieces = after(self._pieces, rank.begin - self.iteration)

    def cut(self, state: EngineState, now: int) -> bool:
        """Let a rank plan again at the first boundary at or after `now`. True: `end` is now earlier."""
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
        """Let a rank plan again after `steps` of its planned iterations. True: `end` is now earlier."""
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
        """Record that a rank has planned, at the current boundary."""
        self.due, self.planning, rank.fresh = True, False, True
        self._until[rank.place] = UNLIMITED  # until something limits it, or it departs
        self._fresh.append(rank)

    def lasts(self) -> int:
        """Ticks of the iteration that begins at this boundary; 0: none is scheduled."""
        if not self._moving:
            return 0
        if self._first is None:
            self._first = self.batches.price(self.iteration, self.start, 1)
        return self._first.end - self.start

    # Time

    def land(self) -> list[Rank]:
        """End the current iterations. Returns the ranks whose plans end with them."""
        self.busy, self.due, now = False, True, self.end
        if self._pausing:
            self._pausing = False
            return list(self.ranks)
        steps = self._horizon - self.iteration
        self._latest = self.start
        if steps > 1:  # requests that came before the last of these iterations began have been seen by then
            self._latest = last = end_of(self._pieces, steps - 1)
            self.unseen = {request: came for request, came in self.unseen.items() if came > last}
        if self._bounds:
            self._bounded += self._bounding(steps)
        if self._trace is not None and steps:
            for rank in self.ranks:
                rank.pieces = after(self._pieces, max(0, rank.begin - self.iteration))
        self.batches.advance(steps)
        for rank, work in self._coming:
            self.batches.put(rank.place, work)
        self._moving, self._ends, self._first = self._ahead and not self._ends, False, None
        self._coming.clear()
        self.iteration += steps
        self._counter += max(1, steps)
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
        """Check whether any rank still has work. The ranks whose plans ended are committed before. Requests that
        arrived or were cancelled since the iteration began do not count."""
        if self._running and (self._counter == 1 or self._counter % self.spec.sync_interval == 0):
            unseen, given_up = self.unseen, self.given_up
            gone = {it for rank in self.ranks for it in rank.leaving if given_up.get(it, -1) < self.end}
            if all(it in gone or it in unseen for rank in self.ranks for it in rank.unfinished):
                self._running, self._counter = False, 0
                for rank in self.ranks:
                    if rank.dummy:
                        rank.commit()
        self.unseen.clear()
        self.given_up.clear()
        self._tell()

    def opened(self) -> list[Rank]:
        """Ranks that an event reached after other ranks had planned: they have to plan, too, before `depart`."""
        opened, self._opened = self._opened, []
        return [rank for rank in opened if not rank.fresh]

    def depart(self, now: int) -> bool:
        """Begin the next iterations. All due ranks have planned before. True: the group is busy until `end`."""
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
        self._ends = any(rank.draining for rank in fresh)
        if not self._running and not self._ends:
            if any(rank.busy and rank.unfinished for rank in fresh):
                self._running, self._counter = True, 0
            elif self._moving:
                self._ends = True
            else:
                return False
            fresh = list(self.ranks)
        for rank in fresh:
            self._take(rank)
        if self._ends:
            self._until[:] = self.iteration + 1
            self._coming.clear()
        self.unseen.clear()
        self.given_up.clear()
        self._begin()
        self.busy = True
        self._tell()
        return True

    def _take(self, rank: Rank) -> None:
        """Take over the plan of a rank; a rank without a plan runs dummy batches."""
        if rank.busy and not rank.preempts:
            rests = self._ahead and not self._moving
            self._until[rank.place] = self.iteration + (0 if rests else max(1, rank.steps))
        else:
            self._until[rank.place] = self.iteration + 1 if rank.busy else UNLIMITED
            rank.dummy = rank.busy = True
            rank.steps, rank.begin = 0, self.iteration
        work = rank.work if rank.work.tokens and not rank.dummy else self.batches.idle
        if not self._ahead:
            self.batches.put(rank.place, work)
        elif not (self._moving and self.batches.goes_on(rank.place, work)):
            self._coming.append((rank, work))

    def _begin(self) -> None:
        """Begin the iterations up to the horizon, and price them."""
        first, self._first = self._first, None
        if self._ahead and not self._moving:
            self._horizon, self._pieces, self._bounds, self.end = self.iteration, [], [], self.start
            return
        most = int(self._until.min()) - self.iteration
        if self._exact or self._coming:
            most = 1
        elif self.iteration + most == UNLIMITED:  # no rank has work
            interval = self.spec.sync_interval
            most = interval - self._counter % interval if self._counter else 1
        if first is None or most > 1:
            first = self.batches.price(self.iteration, self.start, most)
        steps, self._pieces, self._bounds, self.end = first
        self._horizon = self.iteration + steps

    def bounded(self, now: int) -> Counter[str]:
        """Ticks of the iterations that have ended by `now`, by bottleneck."""
        if not self.busy or self._pausing:
            return self._bounded
        steps, end = cut([*self._pieces], self._horizon - self.iteration, now)
        return self._bounded + self._bounding(steps if end <= now else steps - 1)

    def _bounding(self, steps: int) -> Counter[str]:
        """Ticks of the first `steps` iterations under way, by bottleneck."""
        found: Counter[str] = Counter()
        following = [before for before, *_ in self._pieces[1:]] + [steps]
        for (before, _, first, more), after_it, name in zip(self._pieces, following, self._bounds, strict=False):
            found[name] += ticks_of(max(0, min(after_it, steps) - before), first, more)
        return found

    # Trace

    def _note(self, iteration: Iteration) -> None:
        assert self._trace is not None
        if self.planning or self._ahead:
            self._noted.append(iteration)
        else:
            self._trace(iteration)

    def _tell(self) -> None:
        """Trace the iterations whose end is known."""
        noted, self._noted = self._noted, []
        for iteration in noted:
            assert self._trace is not None
            end = self._end_from(iteration.start) if iteration.end > iteration.start else iteration.start
            if end is None:
                self._noted.append(iteration)
            else:
                self._trace(replace(iteration, end=end))

    def _end_from(self, start: int) -> int | None:
        """The end of the iteration that began at `start` and is in progress, or has just ended. None: there is none."""
        pieces = self._pieces
        if not pieces or start < pieces[0][1] or start >= self.end:
            return None
        steps = cut([*pieces], UNLIMITED, start)[0] if start > pieces[0][1] else 0
        return end_of(pieces, steps + 1)
