"""The engines of a simulation, the front end of their requests, and the changes to both during the simulation.

Invariant: an engine keeps its number forever, even after it has left service. Code that changes an engine makes sure
that the engine plans at this tick, and that the end of the plan is an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from libra.route.policy import Policy
from libra.sim.deployment import WeightUpdate, check_engines, check_groups, check_roles
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.group import RankGroup
from libra.sim.engine.group_cost import GroupSpec
from libra.sim.engine.messages import Iteration, Pause
from libra.sim.engine.rank import Rank
from libra.sim.engine.request import Request
from libra.sim.engine.tier_transfers import SharedTiers
from libra.sim.events import EventQueue
from libra.sim.frontend import Frontend
from libra.sim.handover import KVMoves
from libra.sim.instances import EngineInstance
from libra.sim.kv_network import KVNetwork
from libra.sim.placement import Placer
from libra.sim.prefill_decode import PrefillDecode
from libra.sim.pull_frontend import PullFrontend
from libra.sim.push_frontend import PushFrontend
from libra.sim.workload.caller import Caller
from libra.sim.workload.requests import Workload

EngineMaker = Callable[..., SimEngine]  # called like `SimEngine(config, cost, index, exact=, trace=, defers=)`


class ClusterState:
    """State of a cluster that `SimCluster` runs. Actions (`at`) may add and close engines.

    `limits` are the largest final contexts of the buckets, shortest first; without limits all engines are one bucket.
    `trace` gets every iteration, including skipped ones. `watch` gets each engine after it has planned, and the tick.
    `exact` visits every iteration, which is slower and gives every request the same outcome. A request that fits no
    engine is refused, or with `patient` waits until engines change. With `kv_moves` a trajectory's KV follows it to
    another engine if that is faster than recomputation. Engines may have roles: `kv_transfer` is the network for KV
    from prefill to decode, and `decode_route` chooses the decode engine. Without `keep`, `requests` stays empty.
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
        kv_transfer: KVNetwork | None = None,
        decode_route: Policy | None = None,
        interrupted: Callable[[Request, int], Request] | None = None,
    ) -> None:
        """`interrupted(request, tick)` makes the request that continues a stopped request. By default this is a new
        request with a number after all others."""
        check_engines(specs, limits)
        check_roles(specs, kv_transfer, [update.refresh for update in updates], may_come=patient)
        check_groups(specs, [update.engines for update in updates])
        entries = sum(spec.role.takes == "prompt" for spec in specs)
        if route is None and (entries > 1 or patient):
            raise ValueError(f"route is missing for {entries} engines: give a policy")
        if decode_route is None and len(specs) - entries > 1:
            raise ValueError(f"decode_route is missing for {len(specs) - entries} decode engines: give a policy")
        if limits is None:
            limits = (max(spec.config.max_model_len for spec in specs),)
        self.engines: list[SimEngine] = []  # all engines that ever existed
        self.groups: list[RankGroup] = []
        self.specs: list[EngineSpec] = []
        self.requests: list[Request] = []  # all requests that have arrived, in the order of arrival
        self.now = 0
        self.partial = False  # whether the time limit came before the end
        self.workload = workload
        decoders = None if kv_transfer is None else Placer(decode_route, limits, turn_tokens)
        self.placer = Placer(route, limits, turn_tokens, decoders)
        self._exact, self._trace, self._watch, self._limit = exact, trace, watch, time_limit
        self._keep = keep
        self._begun = self._pausing = False
        self.pairs: PrefillDecode | None = None
        if kv_transfer is not None and decoders is not None:
            self.pairs = (PushFrontend if kv_transfer.push else PullFrontend)(
                self,
                self.placer,
                decoders,
                kv_transfer,
                keep=keep,
                patient=patient,
                kv_moves=kv_moves,
                interrupted=interrupted,
            )
        self._shared_tiers = SharedTiers()
        self.frontend = self.pairs or Frontend(
            self, self.placer, patient=patient, kv_moves=kv_moves, interrupted=interrupted
        )
        self._add(specs)
        self._events = EventQueue(updates)
        self._deciding: set[int] = set()  # engines that have to decide at this tick
        self._draining: dict[int, Callable[[int], None]] = {}  # engines that drain, and the action that follows

    # For workloads and actions, while the cluster runs

    @property
    def moved_tokens(self) -> int:
        """Tokens whose KV followed a trajectory from one engine to another."""
        return self.frontend.moved_tokens

    @property
    def instances(self) -> tuple[EngineInstance, ...]:
        """All engines in service, of any role."""
        return tuple(instance for placer in self.frontend.placers for instance in placer.fleet.instances)

    @property
    def kv_tokens(self) -> int:
        """Total tokens for which the engines in service have KV memory."""
        return sum(self.specs[it.engine.index].config.kv_tokens for it in self.placer.fleet.instances)

    def generated(self, request: Request) -> int:
        """Tokens that a request has generated so far."""
        if request.engine is None or request.status not in ("running", "waiting"):
            return request.generated
        return self.engines[request.engine].generated_by(request, self.now)

    def pause(self) -> None:
        """Let `run` return at the end of this tick."""
        self._pausing = True

    def at(self, tick: int, action: Callable[[int], None]) -> None:
        """Call `action` at `tick`, which must not be over: after the ends of plans and before the arrivals of that
        tick."""
        if tick < self.now:
            raise ValueError(f"tick {tick} is in the past; give {self.now}, the present, or more")
        self._events.act(tick, action)

    def submit(self, request: Request) -> None:
        """Add a request to those of the workload. It arrives now or later."""
        self._events.arrive(request)

    def update(self, update: WeightUpdate) -> None:
        """Begin a weight update now."""
        if update.refresh:
            self.frontend.refreshed()
        for engine in [engine for placer in self.frontend.placers for engine in placer.engines()]:
            if update.engines is None or engine.index in update.engines:
                self.changed(engine, engine.pause(Pause(update.pause, update.refresh), self.now))

    def reallocate(self, limits: tuple[int, ...], buckets: Mapping[str, int]) -> None:
        """Change the buckets' limits, and assign engines, by name, to buckets."""
        for placer in self.frontend.placers:
            placer.reallocate(limits, buckets)
        self.frontend.look_again()

    def add(self, spec: EngineSpec, make: EngineMaker = SimEngine) -> SimEngine:
        """Put an engine into service, and return it. Raises ValueError for a rank, since groups never change."""
        if spec.group is not None:
            raise ValueError(f"{spec.name} is a rank of {spec.group.name}: give groups at the start of the simulation")
        self._add([spec], make)
        self.frontend.look_again()
        return self.engines[-1]

    def close(self, name: str) -> None:
        """Stop an engine at the end of the current iteration; its requests continue on other engines. The name of a
        rank stops its whole group."""
        self._close(self._out_of_service(name))

    def drain(self, name: str, then: Callable[[int], None]) -> None:
        """Send an engine no more requests, and close it once it has finished its requests and keeps no KV for other
        engines. Then call `then` with the tick. The engine keeps its weights. Raises ValueError for a rank of a
        group."""
        engine = self._out_of_service(name)
        if isinstance(engine.clock, RankGroup):
            raise ValueError(f"engine {name} is a rank of a group, which is not drained: close it")
        self._draining[engine.index] = then
        self._close_if_drained(engine)

    def _out_of_service(self, name: str) -> SimEngine:
        return next((it for it in self.frontend.placers if name in it), self.placer).remove(name)

    def _close(self, first: SimEngine) -> None:
        group = first.clock
        engines: Sequence[SimEngine] = group.ranks if isinstance(group, RankGroup) else (first,)
        for engine in engines:
            if engine is not first:
                self._out_of_service(self.specs[engine.index].name)
            self.changed(engine, engine.close(self.now))
            if not engine.busy:
                self._empty(engine)

    def _close_if_drained(self, engine: SimEngine) -> None:
        if not (engine.busy or engine.unfinished or engine.sending or engine.orphans):
            then = self._draining.pop(engine.index)
            self._close(engine)
            self.at(self.now + 1, then)

    def _add(self, specs: Sequence[EngineSpec], make: EngineMaker = SimEngine) -> None:
        known = len(self.engines)
        engines = [
            (make if spec.group is None else Rank)(
                spec.config, spec.cost, known + place, exact=self._exact, trace=self._trace, defers=spec.defers
            )
            for place, spec in enumerate(specs)
        ]
        for spec, engine in zip(specs, engines, strict=True):
            if engine.tiers is not None:
                self._shared_tiers.join(engine.tiers.transfers, spec.node or spec.name)
                engine.tiers.transfers.look_at = partial(self._tier_changed, engine)
        self._group(specs, engines)
        self.frontend.add(specs, engines)
        self.engines += engines
        self.specs += specs

    def _group(self, specs: Sequence[EngineSpec], engines: Sequence[SimEngine]) -> None:
        """Give the ranks of each group their common clock."""
        ranks: dict[str, tuple[GroupSpec, list[Rank]]] = {}
        for spec, engine in zip(specs, engines, strict=True):
            if isinstance(engine, Rank) and spec.group is not None:
                ranks.setdefault(spec.group.name, (spec.group, []))[1].append(engine)
        self.groups += [
            RankGroup(group, of_it, exact=self._exact, trace=self._trace) for group, of_it in ranks.values()
        ]

    def _empty(self, engine: SimEngine) -> None:
        """Stop everything on a closing engine that is at a boundary. If other batches are in flight, the next boundary
        continues this."""
        if engine.plan(self.now) is not None:
            self._events.end(engine)
        if engine.ended:
            self.frontend.planned(engine, self.now)
        self._go_on(engine)
        if engine.closed:
            self.frontend.closed(engine, self.now)

    def _go_on(self, engine: SimEngine) -> None:
        """Let the requests that an engine has stopped arrive again now."""
        stopped, engine.interrupted = engine.interrupted, []
        self.frontend.go_on(engine, stopped, self.now)

    # For the front end

    def cancel_at(self, tick: int, request: Request) -> None:
        self._events.cancel(tick, request)

    def _tier_changed(self, engine: SimEngine, now: int) -> None:
        if engine.tier_changed(now):
            self._events.end(engine)

    def look_at(self, engine: SimEngine) -> None:
        if engine.index in self._draining and engine.index not in self._deciding:
            self._close_if_drained(engine)
        if self._watch is not None:
            self._watch(engine, self.now)

    def changed(self, engine: SimEngine, sooner: bool) -> None:
        if sooner:
            self._events.end(engine.group if isinstance(engine, Rank) else engine)
        if not engine.busy or engine.open:
            self._deciding.add(engine.index)

    def ended(self, request: Request) -> None:
        """Record that a request is finished, cancelled or refused, and submit the request that the workload makes
        then."""
        for placer in self.frontend.placers:
            placer.ended(request)
        following = self.workload.finished(request, self.now)
        if following is not None:
            owner, after = request.owner, following.owner
            if isinstance(owner, Caller) and isinstance(after, Caller) and after.trajectory is owner.trajectory:
                after.engine = owner.engine
            self.submit(following)
