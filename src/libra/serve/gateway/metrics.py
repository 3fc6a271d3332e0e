"""Counters and gauges of the gateway for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from libra.serve.gateway.upstreams import Upstream, Upstreams

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(slots=True)
class Counts:
    """Since the start."""

    placements: int = 0
    migrations: int = 0
    retries: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    forgotten: int = 0

    def placed(self, migrated: bool) -> None:
        self.placements += 1
        self.migrations += migrated

    def answered(self, prompt_tokens: int, generated_tokens: int) -> None:
        self.turns += 1
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens


_COUNTERS = {
    "placements": "Turns sent to an engine.",
    "migrations": "Turns sent to another engine than the turn before.",
    "retries": "Turns sent again after their engine failed.",
    "turns": "Turns answered.",
    "prompt_tokens": "Prompt tokens of answered turns.",
    "generated_tokens": "Generated tokens of answered turns.",
    "finished": "Trajectories finished.",
    "forgotten": "Trajectories dropped after idle_seconds without a turn.",
}


@dataclass(slots=True, eq=False)
class _GatewayCollector(Collector):
    upstreams: Upstreams
    counts: Counts
    live: int

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for name, help in _COUNTERS.items():
            yield CounterMetricFamily(f"libra_gateway_{name}", help, value=getattr(self.counts, name))
        yield GaugeMetricFamily("libra_gateway_trajectories", "Trajectories in progress.", value=self.live)
        gauges: dict[str, tuple[str, Callable[[Upstream], float]]] = {
            "healthy": ("1 if in service.", lambda it: float(self.upstreams.is_healthy(it.id))),
            "in_flight": ("Turns in flight.", lambda it: it.in_flight),
            "load_tokens": ("Context tokens of the turns in flight.", lambda it: it.load_tokens),
        }
        for name, (help, value) in gauges.items():
            gauge = GaugeMetricFamily(f"libra_gateway_engine_{name}", help, labels=["engine"])
            for engine in self.upstreams.all.values():
                gauge.add_metric([engine.id], value(engine))
            yield gauge


def exposition(upstreams: Upstreams, counts: Counts, live: int) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_GatewayCollector(upstreams, counts, live))
    return generate_latest(registry)
