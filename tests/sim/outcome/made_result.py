"""Small simulations whose every iteration takes a second, so that times can be followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.outcome.occupancy import OccupancyRecorder
from libra.sim.outcome.result import SimulationResult, result_of
from libra.sim.workload.replay import Replay
from libra.sim.workload.requests import Requests, Workload
from libra.trajectory import Trajectory, Turn

SECOND = AffineCost(TICKS)


def small(**changes: Any) -> EngineConfig:
    settings = {
        "max_model_len": 64,
        "kv_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(**(settings | changes))


def request(number: int, seconds: float, prompt: int, output: int, cancel: float | None = None) -> Request:
    cancel_at = None if cancel is None else round(cancel * TICKS)
    return Request(number, round(seconds * TICKS), prompt, output, cancel_at=cancel_at)


def simulated(
    workload: Workload | Sequence[Request], *, watcher: OccupancyRecorder | None = None, **settings: Any
) -> SimulationResult:
    """The result on one engine, `e`; `settings` are the cluster's."""
    if not isinstance(workload, Replay):
        made = workload
        workload = Requests(lambda: iter(made), {"name": "by hand"})  # type: ignore[arg-type]
    cluster = SimCluster([EngineSpec("e", small(), SECOND)], workload, watch=watcher, **settings)
    cluster.run()
    return result_of(cluster, watcher)


def all_ends() -> list[Request]:
    """Every way in which a request can end, within a time limit of 10 s."""
    return [
        request(0, 0, 6, 3),
        request(1, 0, 64, 5),  # refused
        request(2, 0, 70, 5),  # refused
        request(3, 0, 4, 50, cancel=2.5),
        request(4, 1, 4, 100),  # generates still
        request(5, 5, 4, 2, cancel=5),  # cancelled as it comes
        request(6, 20, 4, 2),
    ]


def two_trajectories() -> Replay:
    turns = (Turn(2, "bash", "ok", 3, 2.0), Turn(1, None, None, 0))
    return Replay(
        [
            Trajectory("a", "prompt of a", "task", 4, turns, None, 0, True),
            Trajectory("b", "prompt of b", "task", 4, (Turn(3, None, None, 0),), None, 0, True),
        ]
    )
