"""Engines, the policy that routes to them, and time.

Invariant: events are handled in one total order: by tick, then by kind, then by the number of the engine, the request
or the order. After the last event of a tick, engines that were touched decide what is next, by their numbers. So the
outcome does not depend on how often an engine was looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace

from libra.route.policy import Policy
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import Engine, Pause
from libra.sim.engine.request import Request
from libra.sim.engine.scheduler import Iteration
from libra.sim.handover import KVMoves
from libra.sim.placement import EngineFleet, Placer
from libra.sim.weight_update import WeightUpdate
from libra.sim.workload.caller import Caller, TrajectoryCaller
from libra.sim.workload.protocol import Workload

_RESTS = 1 << 60  # numbers of requests that are what is left of others


class Kind(IntEnum):
    """What an event is, in the order in which events of one tick are handled."""

    END = 0  # of what an engine planned, unless that was cut since
    CANCELLATION = 1
    UPDATE = 2  # of weights
    ACTION = 3
    ARRIVAL = 4


_END, _CANCELLATION, _UPDATE, _ACTION, _ARRIVAL = Kind

# (tick, kind, number, what): no two have the same kind and number at one tick, but ends, which are alike
Order = Request | WeightUpdate | Callable[[int], None] | None
Event = tuple[int, Kind, int, Order]


class Cluster:
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
        watch: Callable[[Engine, int], None] | None = None,
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
        self.engines: list[Engine] = []  # all that there ever were
        self.specs: list[EngineSpec] = []
        self.requests: list[Request] = []  # all that came, in the order in which they did
        self.now = 0
        self.partial = False  # the time limit came before the end
        self.workload = workload
        self.moved_tokens = 0
        self._placer = Placer(route, limits, turn_tokens)
        self._routed = route is not None
        self._exact, self._trace, self._watch, self._limit = exact, trace, watch, time_limit
        self._patient, self._keep, self._kv_moves = patient, keep, kv_moves
        self._rest = interrupted or self._rest_of
        self._rests = self._actions = self._refreshes = 0
        self._unplaced: list[Request] = []
        self._again: set[Request] = set()  # that arrived before, and will once more
        self._known: Iterator[Request] = iter(())  # what the workload says beforehand
        self._next: Request | None = None  # of these, the one whose arrival is an event already
        for spec in specs:
            self._add(spec)
        self._events: list[Event] = [(update.at, _UPDATE, number, update) for number, update in enumerate(updates)]
        heapify(self._events)
        self._updates = len(updates)
        for update in updates:
            if update.link is not None:
                update.link.reset()
        self._deciding: set[int] = set()  # engines that have to at this tick

    # What came of it

    @property
    def placements(self) -> int:
        return self._placer.placements

    @property
    def migrations(self) -> int:
        return self._placer.migrations

    @property
    def migrated_tokens(self) -> int:
        return self._placer.migrated_tokens

    # What whoever makes the workload may do to the cluster while it runs

    @property
    def fleet(self) -> EngineFleet:
        return self._placer.fleet

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
        self._actions += 1
        heappush(self._events, (tick, _ACTION, self._actions, action))

    def submit(self, request: Request) -> None:
        """A request that arrives now or later, besides those that the workload makes."""
        heappush(self._events, (request.arrival, _ARRIVAL, request.number, request))

    def update(self, update: WeightUpdate) -> None:
        """One more weight update, now."""
        self._refreshes += update.refresh
        for engine in self._placer.engines():
            if update.engines is None or engine.index in update.engines:
                self._changed(engine, engine.pause(Pause(update.until, update.refresh), self.now))

    def reallocate(self, limits: tuple[int, ...], buckets: Mapping[str, int]) -> None:
        """From now on the engines, by name, serve these buckets."""
        self._placer.reallocate(limits, buckets)
        self._look_again()

    def add(self, spec: EngineSpec) -> None:
        """An engine is ready."""
        self._add(spec)
        self._look_again()

    def close(self, name: str) -> None:
        """An engine stops at the end of the iteration that is under way; what it had goes on elsewhere."""
        engine = self._placer.remove(name)
        self._changed(engine, engine.close(self.now))
        if not engine.busy:
            self._empty(engine)

    def _add(self, spec: EngineSpec) -> None:
        engine = Engine(spec.config, spec.cost, len(self.engines), exact=self._exact)
        engine.trace = self._trace
        self._placer.add(spec, engine, self)
        self.engines.append(engine)
        self.specs.append(spec)

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
                f" {self._placer.refusal(first)}"
            )

    def _run(self) -> None:
        self._known = iter(self.workload.start())
        self._next = request = next(self._known, None)
        if request is not None:
            self.submit(request)
        events, engines, deciding, watch = self._events, self.engines, self._deciding, self._watch
        while self._drop_what_is_over():
            now = events[0][0]
            if self._limit is not None and now > self._limit:
                self._stop(self._limit)
                return
            self.now = now
            while events and events[0][0] == now:
                _, kind, number, what = events[0]
                if kind is _END:
                    heappop(events)
                    engine = engines[number]
                    if engine.busy and engine.end == now:
                        self._commit(engine, now)
                elif kind is _ARRIVAL:
                    assert isinstance(what, Request)
                    if what is self._next and (request := next(self._known, None)) is not None:
                        self._next = request
                        heapreplace(events, (request.arrival, _ARRIVAL, request.number, request))
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
                    heappush(events, (end, _END, index, None))
                if engine.interrupted:
                    self._go_on(engine)
                if watch is not None:
                    watch(engine, now)
            deciding.clear()

    def _obey(self, order: Order) -> None:
        """A cancellation, new weights, or whatever is to be done."""
        if isinstance(order, WeightUpdate):
            self.update(order)
        elif isinstance(order, Request):
            self._cancel(order)
        elif order is not None:
            order(self.now)

    def _drop_what_is_over(self) -> bool:
        """Drop ends of plans that were cut since. False: nothing is left to happen; what could still be cancelled or
        updated is done."""
        events, engines = self._events, self.engines
        while events:
            tick, kind, number, _ = events[0]
            if kind is _END:
                engine = engines[number]
                if engine.busy and engine.end == tick:
                    return True
                heappop(events)
            elif kind is _CANCELLATION or kind is _UPDATE:
                return any(self._is_to_come(event) for event in events)
            else:
                return True
        return False

    def _is_to_come(self, event: Event) -> bool:
        """Whether the run goes on at least until then."""
        tick, kind, number, _ = event
        if kind is _END:
            return self.engines[number].busy and self.engines[number].end == tick
        return kind is _ACTION or kind is _ARRIVAL

    def _commit(self, engine: Engine, now: int) -> None:
        self._deciding.add(engine.index)
        for request in engine.commit():
            # Whoever cancelled it while its last iteration was under way has gone on already.
            if request.cancel_at is None or request.cancel_at >= now:
                self._ended(request)
        if engine.asked:
            self._placer.ask_again(engine, now)
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
        engine = self._placer.place(request, again=again) if self._routed else self.engines[0]
        if engine is not None:
            self._take(request, engine)
        elif self._patient:
            self._unplaced.append(request)
        else:
            request.status, request.finish = "refused", self.now
            request.reason = self._placer.refusal(request)
            self._ended(request)

    def _take(self, request: Request, engine: Engine) -> None:
        """The engine that the request was given to gets it, and perhaps its KV first."""
        owner = request.owner
        if self._kv_moves is not None and isinstance(owner, Caller):
            source = owner.engine
            if source is not None and source != engine.index and not self.engines[source].closing:
                moved = self._kv_moves.quicker(
                    self.engines[source], self.specs[source], engine, self.specs[engine.index], request, self.now
                )
                if moved is not None:
                    sent = self._refreshes
                    self.at(self.now + moved.ticks, lambda _: self._received(request, engine, moved.tokens, sent))
                    return
        self._submit(request, engine)

    def _received(self, request: Request, engine: Engine, tokens: int, sent: int) -> None:
        """Its KV has arrived, after so many refreshes when it was sent. On the way the engine may have been closed, the
        request given up, or the KV become one of older weights."""
        cancelled = request.cancel_at is not None and request.cancel_at <= self.now
        if cancelled or not self._placer.serves(self.specs[engine.index].name, engine):
            self._arrive_again(request)
            return
        if sent == self._refreshes:
            before = engine.end
            self.moved_tokens += engine.adopt(request, tokens, self.now)
            self._changed(engine, engine.end < before)
        self._submit(request, engine)

    def _submit(self, request: Request, engine: Engine) -> None:
        if self._kv_moves is not None and isinstance(request.owner, Caller):
            request.owner.engine = engine.index
        self._changed(engine, engine.submit(request, self.now))
        if request.status == "refused":
            self._ended(request)
        elif request.cancel_at is not None:
            heappush(self._events, (request.cancel_at, _CANCELLATION, request.number, request))

    def _cancel(self, request: Request) -> None:
        if request.status in ("waiting", "running"):
            assert request.engine is not None
            engine = self.engines[request.engine]
            self._changed(engine, engine.cancel(request, self.now))
            self._ended(request)

    def _empty(self, engine: Engine) -> None:
        """A closing engine at a boundary: it lets go of everything, unless other batches are under way in it."""
        end = engine.plan(self.now)
        if end is not None:
            heappush(self._events, (end, _END, engine.index, None))
        self._go_on(engine)

    def _go_on(self, engine: Engine) -> None:
        """What was stopped on an engine arrives anew, now."""
        stopped, engine.interrupted = engine.interrupted, []
        for request in stopped:
            following = self._rest(request, self.now)
            self._placer.goes_on(request, following)
            self.submit(following)

    def _rest_of(self, request: Request, now: int) -> Request:
        owner = request.owner
        if isinstance(owner, TrajectoryCaller):
            owner = replace(owner, generated_before=owner.generated_before + request.generated, told=True)
        self._rests += 1
        return Request(
            _RESTS + self._rests,
            now,
            request.prompt_tokens + request.generated,
            request.output_tokens - request.generated,
            chain=request.chain,
            priority=request.priority,
            cancel_at=request.cancel_at,
            owner=owner,
        )

    def _changed(self, engine: Engine, sooner: bool) -> None:
        if sooner:
            heappush(self._events, (engine.end, _END, engine.index, None))
        if not engine.busy or engine.open:
            self._deciding.add(engine.index)

    def _ended(self, request: Request) -> None:
        """Finished, given up or refused: see what follows."""
        self._placer.ended(request)
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
        arriving = [what for _, kind, _, what in sorted(self._events, key=lambda event: event[:3]) if kind is _ARRIVAL]
        if self._next is not None:
            self.requests += [self._next, *self._known]
        self.requests += [
            it for it in arriving if isinstance(it, Request) and it is not self._next and it not in self._again
        ]
        for request in self.requests:
            if request.status == "waiting":
                request.status, request.reason = "unfinished", "the time limit came before its arrival"
