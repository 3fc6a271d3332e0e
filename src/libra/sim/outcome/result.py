"""What came out of one simulation.

Invariant: a value that holds on to nothing of the cluster it was made from: columns of numbers, and each engine's name,
configuration and counts. Equal simulations give equal results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.outcome.engine_series import EngineSeries
from libra.sim.outcome.request_columns import RequestColumns, request_columns
from libra.sim.outcome.watcher import OccupancyRecorder


@dataclass(frozen=True, slots=True)
class EngineResult:
    """One engine. What a time limit cut short counts up to there, save a lone iteration."""

    name: str
    bucket: int
    config: EngineConfig
    busy_ticks: int
    paused_ticks: int
    held_ticks: int  # KV blocks held, times ticks, times 2
    iterations: int
    events: int
    preemptions: int


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    workload: Mapping[str, Any]  # its description, as JSON values
    requests: RequestColumns
    engines: tuple[EngineResult, ...]
    series: tuple[EngineSeries, ...]  # one an engine, or none where nobody watched
    partial: bool  # the time limit came before the end
    end: int  # tick of the last thing that happened, or the time limit

    @property
    def start(self) -> int:
        """Tick of the first arrival."""
        return int(self.requests.arrival.min()) if len(self.requests) else 0

    @property
    def makespan(self) -> int:
        """Ticks from the first arrival to the last end of a request, or to the time limit."""
        if not len(self.requests):
            return 0
        last = self.end if self.partial else int(self.requests.finish.max())
        return max(0, last - self.start)


def result_of(cluster: SimCluster, watcher: OccupancyRecorder | None = None) -> SimulationResult:
    """The result of a cluster that has run. `watcher` is the one that it was given as `watch`: it adds the peaks and
    the series over time. Raises ValueError for a cluster that has not run to its end."""
    return SimulationResult(
        workload=cluster.workload.describe(),
        requests=request_columns(cluster.requests),
        engines=tuple(_engine(spec, engine) for spec, engine in zip(cluster.specs, cluster.engines, strict=True)),
        series=() if watcher is None else tuple(watcher.series(it.index, cluster.now) for it in cluster.engines),
        partial=cluster.partial,
        end=cluster.now,
    )


def _engine(spec: EngineSpec, engine: SimEngine) -> EngineResult:
    return EngineResult(
        name=spec.name,
        bucket=spec.bucket,
        config=spec.config,
        busy_ticks=engine.busy_ticks,
        paused_ticks=engine.paused_ticks,
        held_ticks=engine.held_ticks,
        iterations=engine.iterations,
        events=engine.events,
        preemptions=engine.preemptions,
    )
