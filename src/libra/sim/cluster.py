"""Engines, the policy that routes to them, and time.

Invariant: what happens at one instant happens in this order, on all engines: iterations end; cancellations, weight
updates and arrivals come in; engines decide what is next. Within each, engines and requests come by their numbers. So
the outcome does not depend on how often an engine was looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from libra.route import policy
from libra.route.policy import Policy
from libra.sim.engine.batching import Engine, Iteration, Pause
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import IterationCost
from libra.sim.engine.pipeline import PipelinedEngine
from libra.sim.engine.request import Request
from libra.sim.weight_update import WeightUpdate
from libra.sim.workload.caller import TrajectoryCaller
from libra.sim.workload.protocol import Workload

_NEVER = 1 << 80  # ticks, beyond what `clock.ticks` gives
_INDEX_BITS = 24
_INDEX = (1 << _INDEX_BITS) - 1


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine of a cluster."""

    name: str
    config: EngineConfig
    cost: IterationCost
    bucket: int = 0


class Instance:
    """An engine as a routing policy sees it: always the present."""

    __slots__ = ("bucket", "capacity_tokens", "engine", "id")

    def __init__(self, spec: EngineSpec, engine: Engine) -> None:
        self.id = spec.name
        self.bucket = spec.bucket
        self.capacity_tokens = spec.config.max_model_len
        self.engine = engine

    @property
    def load_tokens(self) -> int:
        return self.engine.load_tokens

    @property
    def token_seconds(self) -> float:
        return self.engine.token_seconds


@dataclass(frozen=True, slots=True)
class Fleet:
    """All engines, as a routing policy sees them."""

    instances: tuple[Instance, ...]
    limits: tuple[int, ...]
    turn_tokens: int


class Cluster:
    """One simulation: made, run once, and looked at.

    `limits` are the largest final contexts of the buckets, shortest first; without them all engines are one bucket.
    `trace` is told every iteration, also those that nobody had to visit; `watch` is shown each engine after it decided
    what is next, at that tick. `exact` visits every iteration: the same outcome of every request, slower.
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
    ) -> None:
        if not specs:
            raise ValueError("there is no engine: give one or more")
        if route is None and len(specs) > 1:
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
        self.engines = [_engine(spec, index, exact) for index, spec in enumerate(specs)]
        for engine in self.engines:
            engine.trace = trace
        self.specs = tuple(specs)
        self.requests: list[Request] = []  # all that came, in the order in which they did
        self.now = 0
        self.partial = False  # the time limit came before the end
        self.workload = workload
        self.route = route
        self._fleet = Fleet(
            tuple(Instance(spec, engine) for spec, engine in zip(specs, self.engines, strict=True)), limits, turn_tokens
        )
        self._by_name = {spec.name: engine for spec, engine in zip(specs, self.engines, strict=True)}
        self._limit = time_limit
        self._watch = watch
        self._ends: list[int] = []  # of plans: tick and engine in one number, which a heap compares in one look
        self._following: list[tuple[int, int, Request]] = []  # (arrival, number, request)
        # (tick, number, what) of cancellations, and of weight updates, which come after those of the same instant
        self._orders: list[tuple[int, int, Request | WeightUpdate]] = [
            (update.at, _NEVER + number, update) for number, update in enumerate(updates)
        ]
        heapify(self._orders)
        for update in updates:
            if update.link is not None:
                update.link.reset()
        self._idle: set[int] = set()  # engines that have to decide at this instant

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
            if now == _NEVER:
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
                while orders and orders[0][0] == now:
                    self._obey(heappop(orders)[2])
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
                if watch is not None:
                    watch(engine, now)
            idle.clear()

    def _obey(self, order: Request | WeightUpdate) -> None:
        """A cancellation, or new weights."""
        if isinstance(order, WeightUpdate):
            for engine in self.engines:
                if order.engines is None or engine.index in order.engines:
                    self._changed(engine, engine.pause(Pause(order.until, order.refresh), self.now))
        elif order.status in ("waiting", "running"):
            assert order.engine is not None
            engine = self.engines[order.engine]
            self._changed(engine, engine.cancel(order, self.now))
            self._ended(order)

    def _arrive(self, request: Request) -> None:
        now = self.now
        self.requests.append(request)
        cancel_at = request.cancel_at
        if cancel_at is not None and cancel_at <= now:
            request.status, request.finish = "cancelled", now
            self._ended(request)
            return
        engine = self.engines[0] if self.route is None else self._placed(request, self.route)
        if engine is None:
            request.status, request.finish = "refused", now
            request.reason = (
                f"no engine holds its {request.prompt_tokens} tokens and a turn of {self._fleet.turn_tokens} more"
            )
            self._ended(request)
            return
        self._changed(engine, engine.submit(request, now))
        if request.status == "refused":
            self._ended(request)
        elif cancel_at is not None:
            heappush(self._orders, (cancel_at, request.number, request))

    def _placed(self, request: Request, route: Policy) -> Engine | None:
        owner = request.owner
        if isinstance(owner, TrajectoryCaller):
            asked, returned = owner.routing_request(), owner.returned()
        else:
            name = str(request.number)
            prompt = name if request.chain is None or request.chain.parent is None else request.chain.parent.name
            asked, returned = policy.Request(name, prompt, request.prompt_tokens, request.prompt_tokens), None
        if returned is None:
            placement = route.place(asked, self._fleet)
        else:
            placement = route.tool_returned(asked, returned, self._fleet)
        return None if placement is None else self._by_name[placement.instance]

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
        elif not isinstance(owner, TrajectoryCaller):
            route.forget(str(request.number))
        elif request.status != "finished":
            route.forget(owner.trajectory.id)
        elif owner.last:
            route.finished(owner.trajectory)
        following = self.workload.finished(request, self.now)
        if following is not None:
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
        if upcoming is not None:
            self.requests.append(upcoming)
            self.requests.extend(known)
        self.requests.extend(request for _, _, request in sorted(self._following))
        for request in self.requests:
            if request.status == "waiting":
                request.status, request.reason = "unfinished", "the time limit came before its arrival"


def _engine(spec: EngineSpec, index: int, exact: bool) -> Engine:
    kind = Engine if spec.config.pipeline_parallel_size == 1 else PipelinedEngine
    return kind(spec.config, spec.cost, index, exact=exact)
