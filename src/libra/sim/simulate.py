"""Simulation by one function call.

Invariant: the same arguments give the same result, with or without `progress`. A policy given by name is new; a policy
given as an object keeps its knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libra.route.custom import load_policy
from libra.route.policy import Policy
from libra.sim.clock import seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.deployment import Deployment, WeightUpdate, check_buckets
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.kv_network import KVNetwork
from libra.sim.outcome.occupancy import OccupancyRecorder
from libra.sim.outcome.result import SimulationResult, result_of
from libra.sim.workload.requests import Workload

DECISIONS = 4096  # decisions of engines between two calls of `progress`


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Progress of a simulation."""

    seconds: float  # of simulated time
    arrived: int  # requests
    ended: int  # requests that have ended


def simulate(
    engines: Sequence[EngineSpec],
    workload: Workload,
    route: Policy | str | None = None,
    *,
    limits: tuple[int, ...] | None = None,
    turn_tokens: int = 1,
    updates: Sequence[WeightUpdate] = (),
    time_limit: float | None = None,
    kv_transfer: KVNetwork | None = None,
    decode_route: Policy | str | None = None,
    seed: int = 0,
    exact: bool = False,
    progress: Callable[[Elapsed], None] | None = None,
) -> SimulationResult:
    """Simulate a workload on engines. `route`, a policy or its name, is required with several engines.

    `limits` are the largest final contexts of the engines' buckets, shortest first; without limits, all engines are one
    bucket. `turn_tokens` is the room in tokens that a turn needs beyond its context, `time_limit` is in seconds of
    simulated time, and `seed` is for a named policy. If engines have roles, `kv_transfer` is the network for KV from
    prefill to decode, and `decode_route` chooses the decode engine. `exact` visits every iteration, which is slower and
    has the same result. `progress` is called every few thousand decisions. Raises ValueError if engines, policy and
    limits do not fit together.
    """
    check_buckets(limits, turn_tokens)
    watcher = OccupancyRecorder()
    lookout = _Lookout(watcher, progress)
    cluster = SimCluster(
        engines,
        workload,
        load_policy(route, seed=seed) if isinstance(route, str) else route,
        limits=limits,
        turn_tokens=turn_tokens,
        updates=updates,
        time_limit=None if time_limit is None else ticks(time_limit),
        exact=exact,
        kv_transfer=kv_transfer,
        decode_route=load_policy(decode_route, seed=seed) if isinstance(decode_route, str) else decode_route,
        watch=watcher if progress is None else lookout,
    )
    lookout.cluster = cluster
    cluster.run()
    return result_of(cluster, watcher)


def simulate_deployment(
    deployment: Deployment,
    workload: Workload,
    policy: Policy,
    *,
    seed: int = 0,
    time_limit: float | None = None,
    exact: bool = False,
    progress: Callable[[Elapsed], None] | None = None,
) -> SimulationResult:
    """Simulate a workload on the engines, buckets, weight updates and network of a deployment. `policy` and
    `time_limit` replace the deployment's. See `simulate` for the other arguments."""
    return simulate(
        deployment.engines,
        workload,
        policy,
        limits=deployment.limits,
        turn_tokens=deployment.turn_tokens,
        updates=deployment.updates,
        kv_transfer=deployment.kv_transfer,
        decode_route=deployment.decode_policy(seed),
        time_limit=time_limit,
        exact=exact,
        progress=progress,
    )


class _Lookout:
    """A `watch` that passes each decision to the recorder and reports progress."""

    __slots__ = ("_decisions", "_progress", "_watcher", "cluster")

    def __init__(self, watcher: OccupancyRecorder, progress: Callable[[Elapsed], None] | None) -> None:
        self.cluster: SimCluster | None = None
        self._watcher = watcher
        self._progress = progress
        self._decisions = 0

    def __call__(self, engine: SimEngine, now: int) -> None:
        self._watcher(engine, now)
        self._decisions += 1
        if self._decisions == DECISIONS:
            self._decisions = 0
            assert self.cluster is not None and self._progress is not None
            arrived = len(self.cluster.requests)
            present = sum(len(engine.running) + len(engine.waiting) for engine in self.cluster.engines)
            self._progress(Elapsed(seconds(now), arrived, arrived - present))
