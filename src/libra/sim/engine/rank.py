"""A data-parallel rank: an engine that schedules by itself, but begins and ends its iterations together with its group.

Invariant: a rank schedules like an independent engine, with dummy batches while it has nothing to compute. With
asynchronous scheduling, a dummy batch is an iteration in flight that has no results.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libra.sim.engine.engine import SimEngine
from libra.sim.engine.flight import UnderWay
from libra.sim.engine.group import RankGroup  # imported at run time: the fields of the compiled class need it
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engine.rank_batches import NOTHING, NotedCost, RankWork
from libra.sim.engine.request import Request


@dataclass(slots=True, eq=False, repr=False)
class Rank(SimEngine):
    """An engine of a group. It is driven like any engine, but `plan` returns no end: the group determines the end."""

    place: int = field(default=0, init=False)
    begin: int = field(default=0, init=False)  # number of the group's iteration at which the rank's plan begins
    fresh: bool = field(default=False, init=False)  # the rank has planned at this boundary
    dummy: bool = field(default=False, init=False)  # the rank has no work, and runs dummy batches
    preempts: bool = field(default=False, init=False)  # the rank only preempts in this iteration
    dummies: int = field(default=0, init=False)  # number of dummy batches that the rank has run
    group: RankGroup = field(init=False)
    noted: NotedCost = field(init=False)
    work: RankWork = field(default=NOTHING, init=False)  # batch of the plan's first iteration

    def join(self, group: RankGroup, place: int) -> None:
        self.place, self.group, self.clock = place, group, group
        self.noted = NotedCost(self.cost.uneven)
        self.cost = self.noted

    @property
    def draining(self) -> bool:
        """Whether the rank schedules nothing more, and only ends the iteration in flight."""
        return self.busy and self.under_way is not None and bool(self._due or self.closing)

    def submit(self, request: Request, now: int) -> bool:
        sooner = SimEngine.submit(self, request, now)
        self.group.unseen[request] = now
        return sooner

    def cancel(self, request: Request, now: int) -> bool:
        self.group.given_up.setdefault(request, now)
        return SimEngine.cancel(self, request, now)

    def interrupt(self, request: Request, now: int) -> bool:
        self.group.given_up.setdefault(request, now)
        return SimEngine.interrupt(self, request, now)

    def plan(self, now: int) -> None:
        """Plan from this boundary on; the group determines when the plan ends."""
        self.group.planning = True
        self.noted.work = NOTHING
        if self.config.async_scheduling:
            self._plan_ahead(now)
        else:
            SimEngine.plan(self, now)
        self.work = self.noted.work
        if self.config.speculative is not None and self.work.batch.requests:
            self._look_at_drafts()
        self.preempts = self.under_way is None and self.busy and not self.paused and not self.work.tokens
        self.begin = self.group.iteration
        self.group.planned(self)

    def _look_at_drafts(self) -> None:
        """Limit the plan to iterations with equal numbers of tokens, since the graph depends on it, and note them."""
        generation, batch = self.flight.generation, self.work.batch
        contexts = None
        if self.steps:
            self.steps = generation.alike(self.steps)
            contexts = generation.contexts(self.steps)
        missing = batch.requests * batch.tokens_each - generation.rows
        self.work = self.work._replace(contexts=contexts, missing=missing)

    def _plan_ahead(self, now: int) -> None:
        """Plan with asynchronous scheduling. If the rank was idle, a dummy batch is in flight; if the group was at
        rest, the dummy batch takes no time."""
        group, preempted = self.group, self.preemptions
        lasts = group.lasts()
        stops = bool(self._due or self.closing)
        if self.under_way is not None:
            self.under_way.ticks = lasts
        elif (lasts and stops) or (not stops and (self.running or self.waiting or self.ready or self.notices)):
            self.under_way = UnderWay(lasts, absent=set(self.running), dummy=True)
        SimEngine.plan(self, now)
        if self.steps:  # a single iteration is priced when it begins
            generation = self.flight.generation
            self.noted.line(self.batch(generation.count), generation.context)
        elif self.under_way is not None and self.under_way.dummy and not stops and not self.noted.work.tokens:
            if self.preemptions > preempted:
                return  # the preempted request left room for the next step
            self.under_way, self.busy = None, False

    def commit(self) -> list[Request]:
        if self.dummy:
            self.dummies += self.group.iteration - self.begin
            self.dummy = self.busy = False
            return []
        before = self.under_way
        done = SimEngine.commit(self)
        if before is not None and before.dummy:
            self.dummies += before.ticks > 0
            self.iterations -= 1
            self.busy_ticks -= self.end - self.start
        return done

    def decode_ticks(self, batch: DecodeBatch, context: int) -> int:
        return self.group.batches.ticks_with(batch, context)

    def stop(self, now: int) -> None:
        if self.dummy or (self.under_way is not None and self.under_way.dummy):
            self.busy = False
        self.group.bring(self)
        SimEngine.stop(self, now)
