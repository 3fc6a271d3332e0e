"""Engines, the policy that routes to them, and time.

Invariant: what happens at one instant happens in this order, on all engines: iterations end; cancellations, weight
updates and arrivals come in; engines decide what is next. Within each, engines and requests come by their numbers. So
the outcome does not depend on how often an engine was looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from libra.route import policy
from libra.route.policy import Placement, Policy
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import Engine, Pause
from libra.sim.engine.request import Request
from libra.sim.engine.scheduler import Iteration
from libra.sim.kv_move import KVMoves
from libra.sim.weight_update import WeightUpdate
from libra.sim.workload.caller import Caller, TrajectoryCaller
from libra.sim.workload.protocol import Workload

_NEVER = 1 << 80  # ticks, beyond what `clock.ticks` gives
_RESTS = 1 << 60  # numbers of requests that are what is left of others
_INDEX_BITS = 24
_INDEX = (1 << _INDEX_BITS) - 1


class Instance:
    """An engine as a routing policy sees it: always the present."""

    __slots__ = ("_cluster", "bucket", "capacity_tokens", "engine", "id")

    def __init__(self, spec: EngineSpec, engine: Engine, cluster: Cluster) -> None:
        self._cluster = cluster
        self.id = spec.name
        self.bucket = spec.bucket
        self.capacity_tokens = spec.config.max_model_len
        self.engine = engine

    @property
    def load_tokens(self) -> int:
        return self.engine.load_tokens

    @property
    def token_seconds(self) -> float:
        return self.engine.token_seconds(self._cluster.now)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All engines, as a routing policy sees them."""

    instances: tuple[Instance, ...]
    limits: tuple[int, ...]
    turn_tokens: int


Order = Request | WeightUpdate | Callable[[int], None]


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
        if len(specs) > _INDEX:
            raise ValueError(f"there are {len(specs):,} engines; simulate {_INDEX:,} at most")
        if len({spec.name for spec in specs}) < len(specs):
            raise ValueError("two engines have the same name: names must be unique")
        if limits is None:
            limits = (max(spec.config.max_model_len for spec in specs),)
        for spec in specs:
            if not 0 <= spec.bucket < len(limits):
                raise ValueError(f"engine {spec.name} is in bucket {spec.bucket}, but there are {len(limits)} limits")
        self._exact, self._trace = exact, trace
        self.engines: list[Engine] = []  # all that there ever were
        self.specs: list[EngineSpec] = []
        self.requests: list[Request] = []  # all that came, in the order in which they did
        self.now = 0
        self.partial = False  # the time limit came before the end
        self.workload = workload
        self.route = route
        self._fleet = Fleet((), limits, turn_tokens)
        self._by_name: dict[str, Engine] = {}
        self._patient, self._keep, self._kv_moves = patient, keep, kv_moves
        self._rest = interrupted or self._rest_of
        self._rests = 0
        self._unplaced: list[Request] = []
        self._again: set[Request] = set()  # that arrived before, and will once more
        self._destined: dict[int, Placement] = {}  # by number of the request that is stopped to go on there
        self._actions = self._actions_due = self._refreshes = 0
        self.placements = self.migrations = self.migrated_tokens = self.moved_tokens = 0
        for spec in specs:
            self._add(spec)
        self._limit = time_limit
        self._watch = watch
        self._ends: list[int] = []  # of plans: tick and engine in one number, which a heap compares in one look
        self._following: list[tuple[int, int, Request]] = []  # (arrival, number, request)
        # (tick, number, what) of cancellations, weight updates and actions: in this order at one instant
        self._orders: list[tuple[int, int, Order]] = [
            (update.at, _NEVER + number, update) for number, update in enumerate(updates)
        ]
        heapify(self._orders)
        for update in updates:
            if update.link is not None:
                update.link.reset()
        self._idle: set[int] = set()  # engines that have to decide at this instant

    # What whoever makes the workload may do to the cluster while it runs

    @property
    def fleet(self) -> Fleet:
        return self._fleet

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
        self._actions_due += 1
        heappush(self._orders, (tick, 2 * _NEVER + self._actions, action))

    def submit(self, request: Request) -> None:
        """A request that arrives now or later, besides those that the workload makes."""
        heappush(self._following, (request.arrival, request.number, request))

    def update(self, update: WeightUpdate) -> None:
        """One more weight update, now."""
        self._obey(update)

    def reallocate(self, limits: tuple[int, ...], buckets: Mapping[str, int]) -> None:
        """From now on the engines, by name, serve these buckets."""
        for instance in self._fleet.instances:
            instance.bucket = buckets[instance.id]
        self._fleet = replace(self._fleet, limits=limits)
        self._look_again()

    def add(self, spec: EngineSpec) -> None:
        """An engine is ready."""
        self._add(spec)
        self._look_again()

    def close(self, name: str) -> None:
        """An engine stops at the end of the iteration that is under way; what it had goes on elsewhere."""
        engine = self._by_name.pop(name)
        self._fleet = replace(self._fleet, instances=tuple(it for it in self._fleet.instances if it.id != name))
        if self.route is not None:
            self.route.instance_gone(name)
        self._changed(engine, engine.close(self.now))
        if not engine.busy:
            self._empty(engine)

    def _add(self, spec: EngineSpec) -> None:
        if spec.name in self._by_name:
            raise ValueError(f"there is an engine {spec.name} already: close it first")
        engine = Engine(spec.config, spec.cost, len(self.engines), exact=self._exact)
        engine.trace = self._trace
        self.engines.append(engine)
        self.specs.append(spec)
        self._by_name[spec.name] = engine
        self._fleet = replace(self._fleet, instances=(*self._fleet.instances, Instance(spec, engine, self)))

    def _look_again(self) -> None:
        for request in self._unplaced:
            self._arrive_again(request)
        self._unplaced.clear()

    def _arrive_again(self, request: Request) -> None:
        request.arrival = self.now
        self._again.add(request)
        self.submit(request)

    def run(self) -> None:
        """Until everything has finished, or the time limit."""
        collecting = gc.isenabled()
        gc.disable()  # nothing that is let go refers to itself, and looking for it would take a third of the time
        try:
            self._run()
        finally:
            if collecting:
                gc.enable()

    def _run(self) -> None:
        known = iter(self.workload.start())
        upcoming = next(known, None)
        upcoming_at = _NEVER if upcoming is None else upcoming.arrival
        ends, following, orders, idle = self._ends, self._following, self._orders, self._idle
        engines, watch = self.engines, self._watch
        limit = _NEVER if self._limit is None else self._limit
        while True:
            now = upcoming_at
            while ends:
                end, index = ends[0] >> _INDEX_BITS, ends[0] & _INDEX
                if engines[index].busy and engines[index].end == end:
                    if end < now:
                        now = end
                    break
                heappop(ends)  # that plan was cut
            if following and following[0][0] < now:
                now = following[0][0]
            if now == _NEVER and not self._actions_due:
                break
            if orders and orders[0][0] < now:
                now = orders[0][0]
            if now > limit:
                self._stop(upcoming, known)
                break
            self.now = now
            while True:
                while ends and ends[0] >> _INDEX_BITS == now:
                    index = heappop(ends) & _INDEX
                    engine = engines[index]
                    if engine.busy and engine.end == now:
                        idle.add(index)
                        for request in engine.commit():
                            # Whoever cancelled it while its last iteration was under way has gone on already.
                            if request.cancel_at is None or request.cancel_at >= now:
                                self._ended(request)
                        if engine.asked:
                            self._ask(engine)
                            engine.release_leaving(now)
                        if engine.closing:
                            self._empty(engine)
                            idle.discard(index)
                        if engine.interrupted:
                            self._go_on(engine)
                while orders and orders[0][0] == now:
                    self._obey(heappop(orders)[2])
                if ends and ends[0] >> _INDEX_BITS == now:  # an order ended a plan at this very instant
                    continue
                while True:
                    if upcoming is not None and upcoming_at == now:
                        if following and following[0][0] == now and following[0][1] < upcoming.number:
                            request = heappop(following)[2]
                        else:
                            request = upcoming
                            upcoming = next(known, None)
                            upcoming_at = _NEVER if upcoming is None else upcoming.arrival
                    elif following and following[0][0] == now:
                        request = heappop(following)[2]
                    else:
                        break
                    self._arrive(request)
                if not ends or ends[0] >> _INDEX_BITS > now:  # otherwise an arrival ended a plan at this very instant
                    break
            for index in sorted(idle) if len(idle) > 1 else idle:
                engine = engines[index]
                planned = engine.plan(now)
                if planned is not None:
                    heappush(ends, planned << _INDEX_BITS | index)
                if engine.interrupted:
                    self._go_on(engine)
                if watch is not None:
                    watch(engine, now)
            idle.clear()
        if self._unplaced and not self.partial:
            first = self._unplaced[0]
            raise RuntimeError(
                f"{len(self._unplaced)} requests wait for an engine for ever, first of all {first.number}:"
                f" {_none(first, self._fleet)}"
            )

    def _obey(self, order: Order) -> None:
        """A cancellation, new weights, or whatever is to be done."""
        if isinstance(order, WeightUpdate):
            self._refreshes += order.refresh
            for engine in self._by_name.values():
                if order.engines is None or engine.index in order.engines:
                    self._changed(engine, engine.pause(Pause(order.until, order.refresh), self.now))
        elif not isinstance(order, Request):
            self._actions_due -= 1
            order(self.now)
        elif order.status in ("waiting", "running"):
            assert order.engine is not None
            engine = self.engines[order.engine]
            self._changed(engine, engine.cancel(order, self.now))
            self._ended(order)

    def _arrive(self, request: Request) -> None:
        now = self.now
        again = request in self._again
        self._again.discard(request)
        if self._keep and not again:
            self.requests.append(request)
        cancel_at = request.cancel_at
        if cancel_at is not None and cancel_at <= now:
            request.status, request.finish = "cancelled", now
            self._ended(request)
            return
        engine = self.engines[0] if self.route is None else self._placed(request, self.route, again)
        if engine is not None:
            self._take(request, engine)
        elif self._patient:
            self._unplaced.append(request)
        else:
            request.status, request.finish = "refused", now
            request.reason = _none(request, self._fleet)
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
        if cancelled or self._by_name.get(self.specs[engine.index].name) is not engine:
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
            heappush(self._orders, (request.cancel_at, request.number, request))

    def _placed(self, request: Request, route: Policy, again: bool) -> Engine | None:
        placement = self._destined.pop(request.number, None)
        if placement is not None and placement.instance not in self._by_name:
            placement = None
        if placement is None:
            placement = self._place(request, route, again)
        if placement is None:
            return None
        self.placements += 1
        if placement.migrated:
            self.migrations += 1
            self.migrated_tokens += request.prompt_tokens
        request.priority = placement.priority
        request.ask_at = None  # of an earlier placement, on an engine that closed before it got there
        if placement.ask_again is not None:
            owner = request.owner
            since = owner.generated_since if isinstance(owner, Caller) else 0
            if placement.ask_again > since:
                request.ask_at = placement.ask_again - since
        return self._by_name[placement.instance]

    def _place(self, request: Request, route: Policy, again: bool) -> Placement | None:
        """`again`: the policy has been asked about the request before, and was told of the return that it follows."""
        owner = request.owner
        if not isinstance(owner, Caller):
            name = str(request.number)
            prompt = name if request.chain is None or request.chain.parent is None else request.chain.parent.name
            return route.place(policy.Request(name, prompt, request.prompt_tokens, request.prompt_tokens), self._fleet)
        owner.placed_before = owner.generated_before
        asked, returned = owner.routing_request(), None if again else owner.returned()
        if returned is None:
            return route.place(asked, self._fleet)
        return route.tool_returned(asked, returned, self._fleet)

    def _ask(self, engine: Engine) -> None:
        """Requests that have generated as much as their placement foresaw: the policy says what becomes of them."""
        route = self.route
        assert route is not None
        for request in engine.asked:
            owner = request.owner
            if not isinstance(owner, Caller):
                continue
            since = owner.generated_since
            placement = route.outlived(owner.routing_request(), since + request.generated, self._fleet)
            if placement is None:
                continue
            if self._by_name.get(placement.instance) is engine:
                if placement.ask_again is not None:
                    self._changed(engine, engine.ask(request, placement.ask_again - since, self.now))
            else:
                self._destined[request.number] = placement
                engine.interrupt(request, self.now)

    def _empty(self, engine: Engine) -> None:
        """A closing engine at a boundary: it lets go of everything, unless other batches are under way in it."""
        planned = engine.plan(self.now)
        if planned is not None:
            heappush(self._ends, planned << _INDEX_BITS | engine.index)
        self._go_on(engine)

    def _go_on(self, engine: Engine) -> None:
        """What was stopped on an engine arrives anew, now."""
        stopped, engine.interrupted = engine.interrupted, []
        for request in stopped:
            following = self._rest(request, self.now)
            placement = self._destined.pop(request.number, None)
            if placement is not None:
                self._destined[following.number] = placement
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
            heappush(self._ends, engine.end << _INDEX_BITS | engine.index)
        if not engine.busy or engine.open:
            self._idle.add(engine.index)

    def _ended(self, request: Request) -> None:
        """Finished, given up or refused: tell the policy, and see what follows."""
        owner, route = request.owner, self.route
        if route is None:
            pass
        elif not isinstance(owner, Caller):
            route.forget(str(request.number))
        elif request.status != "finished":
            route.forget(owner.trajectory.id)
        elif owner.last:
            route.finished(owner.trajectory)
        following = self.workload.finished(request, self.now)
        if following is not None:
            after = following.owner
            if isinstance(owner, Caller) and isinstance(after, Caller) and after.trajectory is owner.trajectory:
                after.engine = owner.engine
            heappush(self._following, (following.arrival, following.number, following))

    def _stop(self, upcoming: Request | None, known: Iterator[Request]) -> None:
        """The time limit: what has not ended is reported as such."""
        assert self._limit is not None
        self.now = self._limit
        self.partial = True
        for engine in self.engines:
            engine.stop(self.now)
            if self._watch is not None and not engine.paused:
                self._watch(engine, self.now)
            for request in engine.unfinished:
                if request.status == "cancelled":
                    continue
                request.status, request.reason = "unfinished", "the time limit came first"
        if not self._keep:
            return
        if upcoming is not None:
            self.requests.append(upcoming)
            self.requests.extend(known)
        self.requests.extend(request for _, _, request in sorted(self._following) if request not in self._again)
        for request in self.requests:
            if request.status == "waiting":
                request.status, request.reason = "unfinished", "the time limit came before its arrival"


def _none(request: Request, fleet: Fleet) -> str:
    return f"no engine holds its {request.prompt_tokens} tokens and a turn of {fleet.turn_tokens} more"
