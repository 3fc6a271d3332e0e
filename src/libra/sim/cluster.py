"""Engines, the policy that routes to them, and time.

Invariant: events are handled in one total order: by tick, then by kind, then by the number of the engine, the request
or the order. After the last event of a tick, engines that were touched decide what is next, by their numbers. So the
outcome does not depend on how often an engine was looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush, heapreplace

from libra.route.policy import Policy
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Request
from libra.sim.engine.scheduler import Iteration, Pause
from libra.sim.events import ARRIVAL, CANCELLATION, END, UPDATE, Action, EventQueue
from libra.sim.handover import Handover, Handovers, KVMoves
from libra.sim.placement import Placer, SimulatedFleet
from libra.sim.weight_update import WeightUpdate
from libra.sim.workload.caller import Caller, rest_of
from libra.sim.workload.requests import Workload

_RESTS = 1 << 60  # numbers of requests that are what is left of others


class SimCluster:
    """One simulation: made, run once, and looked at.

    `limits` are the largest final contexts of the buckets, shortest first; without them all engines are one bucket.
    `trace` is told every iteration, also those that nobody had to visit; `watch` is shown each engine after it decided
    what is next, at that tick. `exact` visits every iteration: the same outcome of every request, slower.

    What happens may also add and close engines: see `at`. A request that no engine can hold is refused, or with
    `patient` waits until engines change. With `kv_moves` a trajectory's KV follows it to another engine where that is
    quicker than to compute it again. Without `keep`, `requests` stays empty.
    """

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        workload: Workload,
        route: Policy | None = None,
        *,
        limits: tuple[int, ...] | None = None,
        turn_tokens: int = 1,
        updates: Sequence[WeightUpdate] = (),
        time_limit: int | None = None,
        exact: bool = False,
        trace: Callable[[Iteration], None] | None = None,
        watch: Callable[[SimEngine, int], None] | None = None,
        patient: bool = False,
        keep: bool = True,
        kv_moves: KVMoves | None = None,
        interrupted: Callable[[Request, int], Request] | None = None,
    ) -> None:
        """`interrupted` says how a request goes on that was stopped, given the tick; otherwise what is left of it is a
        request of its own, numbered after all others."""
        if not specs:
            raise ValueError("there is no engine: give one or more")
        if route is None and (len(specs) > 1 or patient):
            raise ValueError(f"there are {len(specs)} engines and no policy: say where requests go")
        if len({spec.name for spec in specs}) < len(specs):
            raise ValueError("two engines have the same name: names must be unique")
        if limits is None:
            limits = (max(spec.config.max_model_len for spec in specs),)
        for spec in specs:
            if not 0 <= spec.bucket < len(limits):
                raise ValueError(f"engine {spec.name} is in bucket {spec.bucket}, but there are {len(limits)} limits")
        self.engines: list[SimEngine] = []  # all that there ever were
        self.specs: list[EngineSpec] = []
        self.requests: list[Request] = []  # all that came, in the order in which they did
        self.now = 0
        self.partial = False  # the time limit came before the end
        self.workload = workload
        self.placer = Placer(route, limits, turn_tokens)
        self._routed = route is not None
        self._exact, self._trace, self._watch, self._limit = exact, trace, watch, time_limit
        self._patient, self._keep = patient, keep
        self._handovers = None if kv_moves is None else Handovers(kv_moves, self.engines, self.specs)
        self._rest = interrupted or self._rest_of_turn
        self._rests = self.moved_tokens = 0
        self._unplaced: list[Request] = []
        self._again: set[Request] = set()  # that arrived before, and will once more
        self._known: Iterator[Request] = iter(())  # what the workload says beforehand
        self._next: Request | None = None  # of these, the one whose arrival is an event already
        self._add(specs)
        self._events = EventQueue(self.engines, updates)
        for update in updates:
            if update.link is not None:
                update.link.reset()
        self._deciding: set[int] = set()  # engines that have to at this tick

    # What whoever makes the workload may do to the cluster while it runs

    @property
    def fleet(self) -> SimulatedFleet:
        return self.placer.fleet

    @property
    def kv_tokens(self) -> int:
        """Tokens that the caches of the engines in service hold."""
        configs = (self.specs[instance.engine.index].config for instance in self.fleet.instances)
        return sum(config.kv_blocks * config.block_size for config in configs)

    def generated(self, request: Request) -> int:
        """Tokens that a request has generated by now."""
        if request.engine is None or request.status not in ("running", "waiting"):
            return request.generated
        return self.engines[request.engine].generated_by(request, self.now)

    def at(self, tick: int, action: Callable[[int], None]) -> None:
        """Do something at a tick that is not over: after what ends at that instant, before what arrives."""
        if tick < self.now:
            raise ValueError(f"tick {tick} is over, it is {self.now}")
        self._events.act(tick, action)

    def submit(self, request: Request) -> None:
        """A request that arrives now or later, besides those that the workload makes."""
        self._events.arrive(request)

    def update(self, update: WeightUpdate) -> None:
        """One more weight update, now."""
        if self._handovers is not None:
            self._handovers.refreshes += update.refresh
        for engine in self.placer.engines():
            if update.engines is None or engine.index in update.engines:
                self._changed(engine, engine.pause(Pause(update.until, update.refresh), self.now))

    def reallocate(self, limits: tuple[int, ...], buckets: Mapping[str, int]) -> None:
        """From now on the engines, by name, serve these buckets."""
        self.placer.reallocate(limits, buckets)
        self._look_again()

    def add(self, spec: EngineSpec) -> None:
        """An engine is ready."""
        self._add([spec])
        self._look_again()

    def close(self, name: str) -> None:
        """An engine stops at the end of the iteration that is under way; what it had goes on elsewhere."""
        engine = self.placer.remove(name)
        self._changed(engine, engine.close(self.now))
        if not engine.busy:
            self._empty(engine)

    def _add(self, specs: Sequence[EngineSpec]) -> None:
        known = len(self.engines)
        engines = [SimEngine(it.config, it.cost, known + place, exact=self._exact) for place, it in enumerate(specs)]
        for engine in engines:
            engine.trace = self._trace
        self.placer.add(list(zip(specs, engines, strict=True)), self)
        self.engines += engines
        self.specs += specs

    def _look_again(self) -> None:
        for request in self._unplaced:
            self._arrive_again(request)
        self._unplaced.clear()

    def _arrive_again(self, request: Request) -> None:
        request.arrival = self.now
        self._again.add(request)
        self.submit(request)

    # The clock

    def run(self) -> None:
        """Until everything has finished, or the time limit. Raises RuntimeError where requests wait for an engine that
        never comes."""
        collecting = gc.isenabled()
        gc.disable()  # nothing that is let go refers to itself, and looking for it would take a third of the time
        try:
            self._run()
        finally:
            if collecting:
                gc.enable()
        if self._unplaced and not self.partial:
            first = self._unplaced[0]
            raise RuntimeError(
                f"{len(self._unplaced)} requests wait for an engine for ever, first of all {first.number}:"
                f" {self.placer.refusal(first)}"
            )

    def _run(self) -> None:
        self._known = iter(self.workload.start())
        self._next = request = next(self._known, None)
        if request is not None:
            self.submit(request)
        events, engines, deciding, watch = self._events.heap, self.engines, self._deciding, self._watch
        while events:
            now, kind, number, what = events[0]
            if kind is END:
                engine = engines[number]
                if not engine.busy or engine.end != now:  # that plan was cut
                    heappop(events)
                    continue
            elif (kind is CANCELLATION or kind is UPDATE) and not self._events.goes_on():
                break
            if self._limit is not None and now > self._limit:
                self._stop(self._limit)
                return
            self.now = now
            while events and events[0][0] == now:
                _, kind, number, what = events[0]
                if kind is END:
                    heappop(events)
                    engine = engines[number]
                    if engine.busy and engine.end == now:
                        self._commit(engine, now)
                elif kind is ARRIVAL:
                    assert isinstance(what, Request)
                    if what is self._next and (request := next(self._known, None)) is not None:
                        self._next = request
                        heapreplace(events, (request.arrival, ARRIVAL, request.number, request))
                    else:
                        heappop(events)
                        if what is self._next:
                            self._next = None
                    self._arrive(what)
                else:
                    heappop(events)
                    self._obey(what)
            for index in sorted(deciding) if len(deciding) > 1 else deciding:
                engine = engines[index]
                end = engine.plan(now)
                if end is not None:
                    heappush(events, (end, END, index, None))
                if engine.interrupted:
                    self._go_on(engine)
                if watch is not None:
                    watch(engine, now)
            deciding.clear()

    def _obey(self, order: Request | WeightUpdate | Action | None) -> None:
        """A cancellation, new weights, or whatever is to be done."""
        if isinstance(order, WeightUpdate):
            self.update(order)
        elif isinstance(order, Request):
            self._cancel(order)
        elif order is not None:
            order(self.now)

    def _commit(self, engine: SimEngine, now: int) -> None:
        self._deciding.add(engine.index)
        for request in engine.commit():
            # Whoever cancelled it while its last iteration was under way has gone on already.
            if request.cancel_at is None or request.cancel_at >= now:
                self._ended(request)
        if engine.asked:
            self.placer.ask_again(engine, now)
        if engine.closing:
            self._empty(engine)
            self._deciding.discard(engine.index)
        if engine.interrupted:
            self._go_on(engine)

    # Requests

    def _arrive(self, request: Request) -> None:
        again = request in self._again
        self._again.discard(request)
        if self._keep and not again:
            self.requests.append(request)
        cancel_at = request.cancel_at
        if cancel_at is not None and cancel_at <= self.now:
            request.status, request.finish = "cancelled", self.now
            self._ended(request)
            return
        engine = self.placer.place(request, again=again) if self._routed else self.engines[0]
        if engine is not None:
            self._take(request, engine)
        elif self._patient:
            self._unplaced.append(request)
        else:
            request.status, request.finish = "refused", self.now
            request.reason = self.placer.refusal(request)
            self._ended(request)

    def _take(self, request: Request, engine: SimEngine) -> None:
        """The engine that the request was given to gets it, and perhaps its KV first."""
        handover = None if self._handovers is None else self._handovers.begin(request, engine, self.now)
        if handover is None:
            self._submit(request, engine)
        else:
            self.at(handover.end, lambda _: self._received(handover))

    def _received(self, handover: Handover) -> None:
        """On the way the engine may have been closed, or the request given up."""
        request, engine = handover.request, handover.engine
        cancelled = request.cancel_at is not None and request.cancel_at <= self.now
        if cancelled or not self.placer.serves(self.specs[engine.index].name, engine):
            self._arrive_again(request)
            return
        assert self._handovers is not None
        before = engine.end
        self.moved_tokens += self._handovers.complete(handover, self.now)
        self._changed(engine, engine.end < before)
        self._submit(request, engine)

    def _submit(self, request: Request, engine: SimEngine) -> None:
        if self._handovers is not None and isinstance(request.owner, Caller):
            request.owner.engine = engine.index
        self._changed(engine, engine.submit(request, self.now))
        if request.status == "refused":
            self._ended(request)
        elif request.cancel_at is not None:
            self._events.cancel(request.cancel_at, request)

    def _cancel(self, request: Request) -> None:
        if request.status in ("waiting", "running"):
            assert request.engine is not None
            engine = self.engines[request.engine]
            self._changed(engine, engine.cancel(request, self.now))
            self._ended(request)

    def _empty(self, engine: SimEngine) -> None:
        """A closing engine at a boundary: it lets go of everything, unless other batches are under way in it."""
        if engine.plan(self.now) is not None:
            self._events.end(engine)
        self._go_on(engine)

    def _go_on(self, engine: SimEngine) -> None:
        """What was stopped on an engine arrives anew, now."""
        stopped, engine.interrupted = engine.interrupted, []
        for request in stopped:
            following = self._rest(request, self.now)
            self.placer.goes_on(request, following)
            self.submit(following)

    def _rest_of_turn(self, request: Request, now: int) -> Request:
        self._rests += 1
        return rest_of(request, _RESTS + self._rests, now)

    def _changed(self, engine: SimEngine, sooner: bool) -> None:
        if sooner:
            self._events.end(engine)
        if not engine.busy or engine.open:
            self._deciding.add(engine.index)

    def _ended(self, request: Request) -> None:
        """Finished, given up or refused: see what follows."""
        if self._routed:
            self.placer.ended(request)
        following = self.workload.finished(request, self.now)
        if following is not None:
            owner, after = request.owner, following.owner
            if isinstance(owner, Caller) and isinstance(after, Caller) and after.trajectory is owner.trajectory:
                after.engine = owner.engine
            self.submit(following)

    def _stop(self, now: int) -> None:
        """The time limit: what has not ended is reported as such."""
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
        if not self._keep:
            return
        arriving = self._events.arrivals()
        if self._next is not None:
            self.requests += [self._next, *self._known]
        self.requests += [it for it in arriving if it is not self._next and it not in self._again]
        for request in self.requests:
            if request.status == "waiting":
                request.status, request.reason = "unfinished", "the time limit came before its arrival"
