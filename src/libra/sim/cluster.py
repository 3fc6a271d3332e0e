"""The event loop of a simulation.

Invariant: events have one total order: by tick, then by kind, then by number. The number is that of the engine or the
request, or the place in the order of addition. After the last event of a tick, affected engines plan their next step,
in the order of their numbers. So the outcome does not depend on how often an engine was visited.
"""

from __future__ import annotations

import gc
from functools import partial

from libra.sim.cluster_state import ClusterState
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.group import RankGroup
from libra.sim.engine.request import Request
from libra.sim.events import ARRIVAL, Action


class SimCluster(ClusterState):
    """One simulation, with the arguments of `ClusterState`. `run` runs it once, or in parts with pauses."""

    def run(self) -> None:
        """Run until all requests have finished, until the time limit, or until the end of a tick in which `pause` was
        called. The next call continues from that tick. Raises RuntimeError if requests wait for an engine that never
        appears.
        """
        self._pausing = False
        collecting = gc.isenabled()
        gc.disable()  # a simulation makes no reference cycles, and the search for them takes a third of the time
        try:
            if not self._begun:
                self._begun = True
                self._events.expect(self.workload.start())
            self._run()
        finally:
            if collecting:
                gc.enable()
        unplaced = self.frontend.unplaced
        if unplaced and not self.partial and not self._pausing:
            first = unplaced[0]
            raise RuntimeError(
                f"{len(unplaced)} requests wait forever for an engine, first request {first.number}:"
                f" {self.placer.refusal(first)}"
            )

    def _run(self) -> None:
        events, engines, deciding, watch = self._events, self.engines, self._deciding, self._watch
        for event in events.until(self._limit):
            if event is not None:
                self.now, kind, _, what = event
                if isinstance(what, SimEngine):
                    self._commit(what, self.now)
                elif kind is ARRIVAL and isinstance(what, Request):
                    self._arrive(what)
                else:
                    self._happen(what)
                continue
            # After the last event of this tick, affected engines plan their next step.
            now = self.now
            for index in sorted(deciding) if len(deciding) > 1 else deciding:
                engine = engines[index]
                if engine.plan(now) is not None:
                    events.end(engine)
                if engine.interrupted:
                    self._interrupted(engine, now)
                if engine.pulls or engine.ended:
                    self.frontend.planned(engine, now)
                if watch is not None:
                    watch(engine, now)
            drained = sorted(deciding & self._draining.keys()) if self._draining else ()
            deciding.clear()
            for index in drained:
                self._close_if_drained(engines[index])
            for group in self.groups:
                if group.due:
                    self._depart(group, now)
            if self._pausing:
                return
        if self._limit is not None and events.goes_on():
            self._stop(self._limit)

    def _happen(self, what: RankGroup | Request | WeightUpdate | Action) -> None:
        """Handle an event other than the end of an engine's plan and an arrival."""
        if isinstance(what, RankGroup):
            for rank in what.land():
                self._commit(rank, self.now)
            what.landed()
        elif isinstance(what, Request):
            self.frontend.cancel(what)
        elif isinstance(what, WeightUpdate):
            self.update(what)
        else:
            what(self.now)

    def _interrupted(self, engine: SimEngine, now: int) -> None:
        """Let requests that the engine stopped while it planned continue on other engines."""
        if not engine.borrowed:
            self._go_on(engine)
            return
        # Some engines have already decided at this tick, or are at a boundary without an event.
        stopped, engine.interrupted = engine.interrupted, []
        self._events.act(now + 1, partial(self.frontend.go_on, engine, stopped))

    def _depart(self, group: RankGroup, now: int) -> None:
        for rank in group.opened():
            rank.plan(now)
            if rank.interrupted:
                self._go_on(rank)
            if rank.pulls or rank.ended:
                self.frontend.planned(rank, now)
            self.look_at(rank)
        if group.depart(now):
            self._events.end(group)

    def _commit(self, engine: SimEngine, now: int) -> None:
        self._deciding.add(engine.index)
        for request in engine.commit():
            if self.frontend.finished(request, now):
                self.ended(request)
        if engine.asked:
            self.placer.ask_again(engine, now)
        if engine.closing:
            self._empty(engine)
            self._deciding.discard(engine.index)
        if engine.interrupted:
            self._go_on(engine)

    def _arrive(self, request: Request) -> None:
        if self._keep and request not in self.frontend.again:
            self.requests.append(request)
        self.frontend.arrive(request)

    def _stop(self, now: int) -> None:
        """Stop at the time limit, and mark open requests as unfinished."""
        self.now = now
        self.partial = True
        for engine in self.engines:
            engine.stop(now)
            if self._watch is not None and not engine.paused:
                self._watch(engine, now)
            for request in engine.unfinished:
                if request.status == "cancelled":
                    continue
                request.status, request.reason = "unfinished", "the time limit came first"
        for request in self.frontend.under_way():
            if request.status == "waiting":
                request.status, request.reason = "unfinished", "the time limit came first"
        if not self._keep:
            return
        self.requests += [it for it in self._events.arrivals() if it not in self.frontend.again]
        for request in self.requests:
            if request.status == "waiting":
                request.status, request.reason = "unfinished", "the time limit came before its arrival"
