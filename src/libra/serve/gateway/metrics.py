"""What passed, for Prometheus."""

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
    migrations: int = 0  # of these, the ones to another engine than the turn before
    again: int = 0  # turns whose engine went away
    turns: int = 0  # that were answered
    prompt_tokens: int = 0  # of those
    generated_tokens: int = 0
    finished: int = 0  # trajectories
    forgotten: int = 0  # trajectories that nothing came of for too long

    def placed(self, migrated: bool) -> None:
        self.placements += 1
        self.migrations += migrated

    def answered(self, prompt_tokens: int, generated_tokens: int) -> None:
        self.turns += 1
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens


_COUNTERS = {
    "placements": "Turns that were given to an engine.",
    "migrations": "Turns that were given to another engine than the one before.",
    "again": "Turns that were asked again, as their engine went away.",
    "turns": "Turns that were answered.",
    "prompt_tokens": "Prompt tokens of those.",
    "generated_tokens": "Generated tokens of those.",
    "finished": "Trajectories that were finished.",
    "forgotten": "Trajectories that nothing came of for too long.",
}


@dataclass(slots=True, eq=False)
class _Figures(Collector):
    upstreams: Upstreams
    counts: Counts
    live: int

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for name, words in _COUNTERS.items():
            yield CounterMetricFamily(f"libra_gateway_{name}", words, value=getattr(self.counts, name))
        yield GaugeMetricFamily("libra_gateway_trajectories", "Trajectories that are under way.", value=self.live)
        gauges: dict[str, tuple[str, Callable[[Upstream], float]]] = {
            "well": ("1: in service.", lambda it: float(self.upstreams.is_well(it.id))),
            "in_flight": ("Turns that it has.", lambda it: it.in_flight),
            "load_tokens": ("Contexts of those, in tokens.", lambda it: it.load_tokens),
        }
        for name, (words, value) in gauges.items():
            gauge = GaugeMetricFamily(f"libra_gateway_engine_{name}", words, labels=["engine"])
            for engine in self.upstreams.all.values():
                gauge.add_metric([engine.id], value(engine))
            yield gauge


def exposition(upstreams: Upstreams, counts: Counts, live: int) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(upstreams, counts, live))
    return generate_latest(registry)
