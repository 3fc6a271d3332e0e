"""Simulations for reports: what their numbers mean is tested with them, here it is how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from libra.route.baselines import LeastLoaded
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import DECODE, PREFILL, EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.kv_network import KVNetwork
from libra.sim.outcome.occupancy import OccupancyRecorder
from libra.sim.outcome.result import SimulationResult, result_of
from libra.sim.workload.distributions import LogNormal, Poisson
from libra.sim.workload.generated import generated_requests
from libra.sim.workload.replay import Replay
from libra.sim.workload.requests import Requests, Workload
from libra.trajectory import Trajectory, Turn

COST = AffineCost(8 * 10**9, 20 * 10**6, 40_000, 25 * 10**6)  # 8 ms an iteration, and what its tokens take


def run(
    workload: Workload, engines: int = 1, *, watched: bool = True, blocks: int = 600, **settings: Any
) -> SimulationResult:
    config = EngineConfig(max_model_len=4096, kv_blocks=blocks, max_num_seqs=16)
    watcher = OccupancyRecorder() if watched else None
    specs = [EngineSpec(f"engine <{index}>", config, COST, index % 2) for index in range(engines)]
    cluster = SimCluster(specs, workload, LeastLoaded(), limits=(2048, 4096), watch=watcher, **settings)
    cluster.run()
    return result_of(cluster, watcher)


def open_loop(count: int = 60, rate: float = 10.0) -> Requests:
    return generated_requests(count, Poisson(rate), LogNormal(300, 0.8, 3000), LogNormal(60, 0.8, 900), 3)


@cache
def busy() -> SimulationResult:
    """Three engines, an update of the weights, all requests finish."""
    return run(open_loop(150, 40.0), 3, updates=[WeightUpdate(2 * TICKS, TICKS // 2)])


@cache
def cut_short() -> SimulationResult:
    """Every end: of 63 requests one is refused, one cancelled, and many are not finished at the limit."""

    def requests() -> list[Request]:
        made = list(open_loop().start())
        made[5].cancel_at = made[5].arrival + TICKS // 10
        made[7].prompt_tokens = 5000
        return made

    return run(Requests(lambda: iter(requests()), {"name": "with <script>"}), time_limit=3 * TICKS)


@cache
def trajectories() -> SimulationResult:
    turns = (Turn(20, "bash", "ok", 100, 1.5), Turn(40, None, None, 0))
    made = [Trajectory(f"t{number}", f"p{number}", "task", 200, turns, None, 0, True) for number in range(12)]
    return run(Replay(made), 2)


def apart(
    count: int = 150,
    rate: float = 30.0,
    *,
    prefill: int = 2,
    decode: int = 2,
    bandwidth: float = 1e12,
    blocks: int = 600,
    seats: int = 64,
    push: bool = False,
    before: Callable[[SimCluster], None] | None = None,
    **settings: Any,
) -> SimulationResult:
    """Prompts are computed on some engines and tokens generated on others, with a megabyte of KV a token.
    `before` may put something on the clock."""
    config = EngineConfig(max_model_len=4096, kv_blocks=2400, max_num_seqs=64)
    generating = replace(config, kv_blocks=blocks, max_num_seqs=seats, num_reserved_decode_tokens=64 if push else 0)
    specs = [EngineSpec(f"prefill-{index}", config, COST, role=PREFILL) for index in range(prefill)]
    specs += [EngineSpec(f"decode-{index}", generating, COST, role=DECODE, kv_bytes=1e6) for index in range(decode)]
    watcher = OccupancyRecorder()
    cluster = SimCluster(
        specs,
        open_loop(count, rate),
        LeastLoaded(),
        watch=watcher,
        kv_transfer=KVNetwork(bandwidth, latency=1e-4, push=push),
        decode_route=LeastLoaded(),
        **settings,
    )
    if before is not None:
        before(cluster)
    cluster.run()
    return result_of(cluster, watcher)
