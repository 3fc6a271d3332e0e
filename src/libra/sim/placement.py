"""Placement of requests on the engines in service, by a routing policy.

Invariant: a policy gets each tool return and each end of a request once, and sees only engines in service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from libra.live.pace import pace_classes
from libra.route import policy
from libra.route.loads import IndexedFleet
from libra.route.policy import Placement, Policy
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engine.request import Request
from libra.sim.instances import EngineInstance, PairInstance, SimulatedFleet
from libra.sim.workload.caller import Caller

_USUAL = DecodeBatch(32)  # engines are compared by the time of an iteration of this batch
_USUAL_CONTEXT = 32 * 4096  # tokens, in total


class Placer:
    """Asks the policy for the engine of each request; without a policy there is only one engine. The policy sees a
    prefill engine together with `decoders`, its decode engines."""

    __slots__ = (
        "_by_bucket",
        "_by_name",
        "_decoders",
        "_destined",
        "_instances",
        "_route",
        "behind",
        "fleet",
        "migrated_tokens",
        "migrations",
        "placements",
        "routed",
    )

    def __init__(
        self, route: Policy | None, limits: tuple[int, ...], turn_tokens: int, decoders: Placer | None = None
    ) -> None:
        self.fleet = IndexedFleet[EngineInstance]((), limits, turn_tokens)
        self.placements = self.migrations = self.migrated_tokens = 0
        self.behind: dict[str, int] = {}  # version of each engine without the latest weights
        self.routed = route is not None  # whether a policy places requests
        self._route = route
        self._decoders = decoders
        self._by_name: dict[str, SimEngine] = {}
        self._instances: dict[int, EngineInstance] = {}  # by index of the engine
        self._by_bucket: dict[int, SimulatedFleet] = {}  # cache, emptied when engines change
        self._destined: dict[int, Placement] = {}  # decided placement of a stopped request's rest, by request number

    # Engines in service

    def engines(self) -> list[SimEngine]:
        return list(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        """Whether an engine with this name is in service."""
        return name in self._by_name

    def serves(self, name: str, engine: SimEngine) -> bool:
        """Whether the engine in service with this name is `engine`."""
        return self._by_name.get(name) is engine

    def bucket_of(self, engine: SimEngine) -> int | None:
        """The bucket that an engine serves now; None if the engine is not in service."""
        instance = self._instances.get(engine.index)
        return None if instance is None else instance.bucket

    def add(self, engines: Sequence[tuple[EngineSpec, SimEngine]], now: Callable[[], int]) -> None:
        """Put engines into service. Raises ValueError if a name is in use."""
        for spec, engine in engines:
            if spec.name in self._by_name:
                raise ValueError(f"engine {spec.name} exists already: close it first")
            self._by_name[spec.name] = engine
        added = [self._instance(spec, engine, now) for spec, engine in engines]
        self._instances |= {it.engine.index: it for it in added}
        self._serve((*self.fleet.instances, *added), self.fleet.limits)

    def _instance(self, spec: EngineSpec, engine: SimEngine, now: Callable[[], int]) -> EngineInstance:
        if self._decoders is None or not spec.role.hands_over:
            return EngineInstance(spec, engine, now)
        return PairInstance(spec, engine, now, self._decoders)

    def remove(self, name: str) -> SimEngine:
        engine = self._by_name.pop(name)
        del self._instances[engine.index]
        self._serve([it for it in self.fleet.instances if it.id != name], self.fleet.limits)
        if self._route is not None:
            self._route.instance_gone(name)
        return engine

    def reallocate(self, limits: tuple[int, ...], buckets: Mapping[str, int]) -> None:
        """Change the buckets' limits, and assign engines, by name, to buckets."""
        for instance in self.fleet.instances:
            instance.bucket = buckets[instance.id]
        self._serve(self.fleet.instances, limits)

    def _serve(self, instances: Iterable[EngineInstance], limits: tuple[int, ...]) -> None:
        """From now on, place requests on `instances`."""
        self._by_bucket.clear()
        served = tuple(instances)
        _classify(served)
        self.fleet = IndexedFleet(served, limits, self.fleet.turn_tokens)

    # Requests

    def place(self, request: Request, *, again: bool, bucket: int | None = None) -> SimEngine | None:
        """The engine for a request; None if the request fits no engine. `again`: the policy has placed the request
        before, and knows the preceding tool return. With `bucket`, the engine is in this bucket."""
        route = self._route
        if route is None:
            return next(iter(self._by_name.values()), None)
        placement = self._destined.pop(request.number, None)
        if placement is not None and placement.instance not in self._by_name:
            placement = None
        if placement is None:
            placement = self._ask(request, route, again, bucket)
        if placement is None:
            return None
        self.placements += 1
        if placement.migrated:
            self.migrations += 1
            self.migrated_tokens += request.prompt_tokens
        request.priority = placement.priority
        request.ask_at = None  # drop the value of an earlier placement, whose engine closed too early to reach it
        if placement.ask_again is not None:
            owner = request.owner
            since = owner.generated_since if isinstance(owner, Caller) else 0
            if placement.ask_again > since:
                request.ask_at = placement.ask_again - since
        return self._by_name[placement.instance]

    def ask_again(self, engine: SimEngine, now: int) -> None:
        """Let the policy decide about requests that have reached the `ask_again` of their placement."""
        route = self._route
        assert route is not None
        for request in engine.asked:
            owner = request.owner
            if not isinstance(owner, Caller):
                continue
            since = owner.generated_since
            placement = route.bucket_overrun(owner.routing_request(), since + request.generated, self._fleet(owner))
            if placement is None:
                continue
            if not placement.migrated:
                if placement.ask_again is not None:
                    engine.ask(request, placement.ask_again - since, now)
            else:
                self._destined[request.number] = placement
                engine.interrupt(request, now)
        engine.release_leaving(now)

    def goes_on(self, stopped: Request, following: Request) -> None:
        """Send the rest of a stopped request, `following`, to the engine chosen by the policy."""
        placement = self._destined.pop(stopped.number, None)
        if placement is not None:
            self._destined[following.number] = placement

    def ended(self, request: Request) -> None:
        """Tell the policy that a request is finished, cancelled or refused."""
        owner, route = request.owner, self._route
        if route is None:
            return
        if not isinstance(owner, Caller):
            route.forget(str(request.number))
        elif request.status != "finished":
            route.forget(owner.trajectory.id)
        elif owner.last and owner.trajectory.finished:
            route.finished(owner.trajectory)
        elif owner.last:  # the trajectory's full length is unknown
            route.forget(owner.trajectory.id)

    def refusal(self, request: Request) -> str:
        return f"no engine holds its {request.prompt_tokens} tokens and a turn of {self.fleet.turn_tokens} more"

    def _ask(self, request: Request, route: Policy, again: bool, bucket: int | None) -> Placement | None:
        owner = request.owner
        if not isinstance(owner, Caller):
            name = str(request.number)
            prompt = name if request.chain is None or request.chain.parent is None else request.chain.parent.name
            return route.place(
                policy.TurnRequest(name, prompt, request.prompt_tokens, request.prompt_tokens), self._of_bucket(bucket)
            )
        owner.placed_before = owner.generated_before
        asked, returned = owner.routing_request(), None if again else owner.returned()
        if returned is None:
            return route.place(asked, self._fleet(owner, bucket))
        return route.tool_returned(asked, returned, self._fleet(owner))

    def _fleet(self, owner: Caller, bucket: int | None = None) -> IndexedFleet[EngineInstance] | SimulatedFleet:
        """The engines whose weights are no older than those at the trajectory's start."""
        needed = owner.trajectory.policy_version
        hidden = {name for name, version in self.behind.items() if version < needed} if self.behind else ()
        fleet = self._of_bucket(bucket)
        if not hidden:
            return fleet
        shown = tuple(it for it in fleet.instances if it.id not in hidden)
        return SimulatedFleet(shown, fleet.limits, fleet.turn_tokens)

    def _of_bucket(self, bucket: int | None) -> IndexedFleet[EngineInstance] | SimulatedFleet:
        if bucket is None or len(self.fleet.limits) == 1:
            return self.fleet
        fleet = self._by_bucket.get(bucket)
        if fleet is None:
            its = tuple(it for it in self.fleet.instances if it.bucket == bucket)
            fleet = self._by_bucket[bucket] = SimulatedFleet(its, self.fleet.limits, self.fleet.turn_tokens)
        return fleet


def _classify(instances: Sequence[EngineInstance]) -> None:
    """Put engines of different paces into classes, as a live router does from the times of turns."""
    if len({id(it.engine.cost) for it in instances}) > 1:
        told = [it.engine.decode_ticks(_USUAL, _USUAL_CONTEXT) for it in instances]
        for instance, number in zip(instances, pace_classes(told), strict=True):
            instance.pace_class = number
