"""Random whole simulations: engines of every kind, alone or as prefill/decode pairs, with work and faults.

Invariant: kind and seed determine a case, no matter how it is run. Nothing that is drawn depends on a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random
from typing import Any, Literal

from libra.cost.transfer import Fabric
from libra.route.catalogue import POLICIES, policy_named
from libra.route.policy import Policy
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import COLOCATED, DECODE, PREFILL, EngineConfig, EngineRole, EngineSpec
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.handover import KVMoves
from libra.sim.kv_network import KVNetwork
from libra.sim.rank_balancer import RankBalancer
from libra.sim.workload.caller import rest_of
from libra.sim.workload.replay import Replay
from libra.sim.workload.requests import Requests, Workload
from libra.trajectory import Trajectory, Turn
from oracles.random_engines import HEAVIER, HEAVY, KINDS, Kind, random_cost, random_engines
from tests.oracles.fidelity.random_workloads import random_case

_RESTS = 1_000_000  # first number of the rests of stopped requests
_REFUSED = ("two requests generate on it", "at the same time: give each a fork", "evict each other's")


@dataclass(frozen=True)
class Fault:
    at: int  # tick
    what: Literal["close", "break", "lose", "drain", "pause", "refresh", "add", "reallocate"]
    name: str  # of an engine
    ticks: int  # of a pause


class Told:
    """A workload that cancels some requests and records all calls."""

    def __init__(self, workload: Workload, cancelled: dict[int, int]) -> None:
        """`cancelled` has the ticks from arrival to cancellation, by request number."""
        self.workload, self._cancelled = workload, cancelled
        self.ended: list[Request] = []

    def start(self) -> Iterable[Request]:
        return map(self._marked, self.workload.start())

    def finished(self, request: Request, now: int) -> Request | None:
        self.ended.append(request)
        following = self.workload.finished(request, now)
        return None if following is None else self._marked(following)

    def describe(self) -> dict[str, Any]:
        return self.workload.describe()

    def _marked(self, request: Request) -> Request:
        after = self._cancelled.get(request.number)
        if after is not None:
            request.cancel_at = request.arrival + after
        return request


@dataclass
class Ran:
    """A simulation that has ended, with everything that was recorded."""

    cluster: SimCluster
    told: Told
    iterations: list[Iteration]
    rests: dict[Request, Request]  # the rest of each stopped request


@dataclass(frozen=True)
class FaultyCase:
    """All inputs of a simulation, except the way in which it is run."""

    specs: tuple[EngineSpec, ...]
    spare: tuple[EngineSpec, ...]  # specs of engines that are added later, one of each role
    work: Callable[[], Workload]
    cancelled: dict[int, int]
    faults: tuple[Fault, ...]
    end: int  # tick after which patient requests find engines again
    policies: Callable[[], tuple[Policy, Policy | None]]
    limits: tuple[int, ...] | None
    transfer: KVNetwork | None
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, *, exact: bool) -> Ran | None:
        """Run the case. None: the simulator refuses the case. This is so if faults delay a turn beyond the fixed
        arrival of the conversation's next turn, or if a tier is too small."""
        route, decode_route = self.policies()
        told, numbers = Told(self.work(), self.cancelled), count(_RESTS)
        iterations: list[Iteration] = []
        rests: dict[Request, Request] = {}

        def interrupted(request: Request, now: int) -> Request:
            rests[request] = rest_of(request, next(numbers), now)
            return rests[request]

        cluster = SimCluster(
            self.specs,
            told,
            route,
            limits=self.limits,
            turn_tokens=1,
            exact=exact,
            trace=iterations.append,
            kv_transfer=self.transfer,
            decode_route=decode_route,
            interrupted=interrupted,
            **self.options,
        )
        for fault in self.faults:
            cluster.at(fault.at, partial(self._happen, cluster, fault))
        if self.options["patient"]:
            for spec in self.spare:
                cluster.at(self.end, partial(self._come, cluster, replace(spec, name=f"{spec.name} at last")))
        try:
            cluster.run()
        except ValueError as error:
            if not any(it in str(error) for it in _REFUSED):
                raise
            return None
        except RuntimeError:  # some requests wait forever
            longest = max(spec.config.max_model_len for spec in self.specs)
            if any(it.prompt_tokens < longest for it in cluster.frontend.unplaced):
                raise
            return None
        return Ran(cluster, told, iterations, rests)

    def _happen(self, cluster: SimCluster, fault: Fault, now: int) -> None:
        there = {it.id: it for it in cluster.instances}
        if fault.what == "add":
            spec = self.spare[fault.ticks % len(self.spare)]
            self._come(cluster, replace(spec, name=f"{spec.name} of {now}"), now)
        elif fault.what == "reallocate":
            buckets = {name: (it.bucket + 1) % len(cluster.placer.fleet.limits) for name, it in there.items()}
            cluster.reallocate(cluster.placer.fleet.limits, buckets)
        elif fault.what in ("pause", "refresh"):
            cluster.update(WeightUpdate(now, fault.ticks, fault.what == "refresh"))
        elif fault.what == "lose":
            for request in cluster.requests if cluster.pairs is not None else ():
                if request.number % 3 == fault.ticks % 3:
                    cluster.pairs.fail_pull(request, now)
        elif fault.name not in there:
            return
        elif fault.what == "break":
            if cluster.pairs is not None:
                cluster.pairs.fail(there[fault.name].engine, now)
        elif fault.what == "drain" and cluster.specs[there[fault.name].engine.index].group is None:
            cluster.drain(fault.name, lambda _: None)
        else:
            cluster.close(fault.name)

    @staticmethod
    def _come(cluster: SimCluster, spec: EngineSpec, now: int) -> None:
        if spec.name not in {it.id for it in cluster.instances}:
            cluster.add(spec)


def faulty_case(kind: Kind, seed: int) -> FaultyCase:
    """A case with engines of a kind. Every other seed has prefill/decode pairs, whose other halves are of any kind."""
    random = Random(f"{kind} {seed}")
    config, requests = random_case(random.randrange(1 << 32))
    apart = seed % 2 == 1
    kinds: list[tuple[EngineRole, Kind]] = [(COLOCATED, kind)]
    if apart:
        takers = [it for it in KINDS if "tiers" not in it]
        kinds = [(PREFILL, kind), (DECODE, random.choice(takers))]
        if kind in takers and random.random() < 0.5:
            kinds = [(PREFILL, random.choice(KINDS)), (DECODE, kind)]
        if random.random() < 0.1:
            kinds.append((COLOCATED, random.choice(takers)))
    step = random.randint(1, 2000) * (HEAVIER if any(it in HEAVY for _, it in kinds) else 1)
    limits = None
    if random.random() < 0.3 and config.max_model_len > 1:
        limits = (config.max_model_len // 2, config.max_model_len)
    config = replace(config, kv_load_failure_policy=random.choice(("fail", "recompute")))
    specs: list[EngineSpec] = []
    beside = Random(f"push {kind} {seed}")
    push = apart and beside.random() < 0.5
    for role, of in kinds:
        drawn = replace(config, kv_blocks=config.kv_blocks * random.choice((1, 1, 2)))
        for bucket in range(1 if limits is None else 2):
            specs += random_engines(of, drawn, random, step, role, bucket)
    if push:
        reserved = config.block_size * beside.randint(1, 3) + beside.randint(0, 1)
        specs = [replace(it, config=_reserving(it.config, reserved)) if it.role == DECODE else it for it in specs]
    spare = []
    for role, _ in kinds:
        first = next(it for it in specs if it.role == role)
        plain = replace(first.config, capture_sizes=())
        cost = random_cost(random, step)
        spare.append(replace(first, name=f"{role.name} spare", config=plain, cost=cost, group=None))
    if limits is not None:
        spare = [replace(it, name=f"{it.name} {bucket}", bucket=bucket) for it in spare for bucket in range(2)]
    work, cancelled, moments = _work(random, config, requests, step)
    busy = [moment + random.randint(0, 30 * step) for moment in moments]
    patient = random.random() < 0.4
    refreshes = not apart and not any(it.config.kv_tiers for it in specs)
    return FaultyCase(
        tuple(specs),
        tuple(spare),
        work,
        cancelled,
        _faults(random, specs, busy, step, refreshes, limits is not None),
        2 * max(moments) + 10_000 * step,
        _policies(random, any(it.group is not None for it in specs), apart, work),
        limits,
        _network(random, step, push=push) if apart else None,
        {
            "patient": patient,
            "time_limit": random.choice(busy) if random.random() < 0.1 else None,
            "kv_moves": _moves(random, step) if random.random() < 0.4 else None,
        },
    )


# Around engines


def _network(random: Random, step: int, *, push: bool) -> KVNetwork:
    seconds = step / TICKS
    return KVNetwork(
        push=push,
        bandwidth=37.0 / (seconds * random.choice((0.01, 0.2, 2))),  # the choice is the steps per token
        latency=random.choice((0.0, 0.3, 3)) * seconds,
        lease=random.choice((8, 100, 10_000)) * seconds,
        local_below=random.choice((0, 0, 16)),
    )


def _reserving(config: EngineConfig, reserved: int) -> EngineConfig:
    """The configuration with `num_reserved_decode_tokens` of `reserved`."""
    least = config.blocks(config.max_model_len) + config.blocks(reserved) + config.draft_blocks
    return replace(config, kv_blocks=max(config.kv_blocks, least), num_reserved_decode_tokens=reserved)


def _moves(random: Random, step: int) -> KVMoves:
    rate = TICKS / step * random.choice((10, 1000))  # tokens/s: a token takes much less than a step
    return KVMoves(1.0, Fabric(link=rate, network=rate / 2, gpus=8, link_latency=0.0, network_latency=step / TICKS))


# Work


def _work(
    random: Random, config: EngineConfig, requests: Sequence[Request], step: int
) -> tuple[Callable[[], Workload], dict[int, int], list[int]]:
    """(workload, ticks after which requests are cancelled, ticks at which many requests may be present)."""
    if random.random() < 0.5:
        trajectories = _trajectories(random, config.max_model_len, step)
        concurrency, seed = random.choice((None, 1, 3)), random.randrange(1 << 32)
        share = random.choice((0.0, 0.2))
        given_up = Random(seed)
        made = sum(len(it.turns) for it in trajectories)
        cancelled = {number: given_up.randint(0, 60 * step) for number in range(made) if given_up.random() < share}
        moments = [number * 5 * step for number in range(made)]
        return partial(Replay, trajectories, concurrency=concurrency), cancelled, moments
    stops = [random.choice(("length", "eos")) if it.output_tokens > 1 else "length" for it in requests]

    def make() -> list[Request]:
        made = [
            Request(
                it.number,
                it.arrival * step,
                it.prompt_tokens,
                it.output_tokens,
                chain=it.chain,
                priority=it.priority,
                stop=stop,
            )
            for it, stop in zip(requests, stops, strict=True)
        ]
        return sorted(made, key=lambda it: (it.arrival, it.number))

    cancelled = {it.number: (it.cancel_at - it.arrival) * step for it in requests if it.cancel_at is not None}
    return partial(Requests, make, {}), cancelled, [it.arrival * step for it in requests]


def _trajectories(random: Random, longest: int, step: int) -> tuple[Trajectory, ...]:
    """Trajectories of few prompts, each of one length. Now and then a trajectory is too long for any engine."""
    prompts = [random.randint(1, max(1, longest // 2)) for _ in range(3)]
    most = max(1, longest // 6)
    made = []
    for number in range(random.randint(1, 12)):
        turns = [
            Turn(
                random.randint(0, most),
                "tool",
                random.choice(("ok", "error")),
                random.randint(0, most),
                random.choice((0, 0, 1, 3, 10.5)) * step / TICKS,
                random.randint(1, longest) if random.random() < 0.05 else None,
            )
            for _ in range(random.randint(0, 4))
        ]
        prompt = random.randrange(3)
        last = Turn(random.randint(1, most), None, None, 0)
        made.append(
            Trajectory(f"t{number}", f"p{prompt}", "task", prompts[prompt], (*turns, last), None, 0, finished=True)
        )
    return tuple(made)


def _policies(
    random: Random, ranks: bool, apart: bool, work: Callable[[], Workload]
) -> Callable[[], tuple[Policy, Policy | None]]:
    route, decode_route = random.choice(POLICIES), random.choice(("least-loaded", "round-robin", "two-choices"))
    balanced = ranks and random.random() < 0.4

    def made() -> tuple[Policy, Policy | None]:
        policy = RankBalancer() if balanced else policy_named(route, seed=7)
        return policy, policy_named(decode_route, seed=7) if apart else None

    return made


# What goes wrong


def _faults(
    random: Random, specs: Sequence[EngineSpec], busy: Sequence[int], step: int, refreshes: bool, buckets: bool
) -> tuple[Fault, ...]:
    kinds = ["close", "close", "break", "lose", "drain", "pause", "add"]
    kinds += ["refresh"] * refreshes + ["reallocate"] * buckets
    return tuple(
        Fault(
            random.choice(busy),
            random.choice(kinds),  # type: ignore[arg-type]
            random.choice(specs).name,
            random.randint(0, 20 * step),
        )
        for _ in range(random.choice((0, 1, 2, 4)))
    )
