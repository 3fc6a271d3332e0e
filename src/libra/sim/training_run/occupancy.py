"""Busy shares of a run's engines, from one published version of the weights to the next.

Invariant: the recorder only reads existing counters of engines, once per version, so a run costs the same without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from libra.sim.clock import seconds
from libra.sim.instances import EngineInstance
from libra.sim.training_run.outcome import EngineSpan


class Occupancy:
    """Collects a span for each engine in service at the publication of a version."""

    def __init__(self) -> None:
        self.spans: list[EngineSpan] = []
        self._since = 0  # tick
        self._busy: dict[int, int] = {}  # ticks, by index of the engine

    def observe(self, instances: Iterable[EngineInstance], limits: Sequence[int], now: int) -> None:
        """Add spans up to tick `now`, at which a version is published. `limits` are the buckets' largest contexts."""
        for instance in instances:
            engine = instance.engine
            worked = engine.busy_ticks - self._busy.get(engine.index, 0)
            self._busy[engine.index] = engine.busy_ticks
            # Iterations count when they end. Those that began before the span must not make it longer.
            busy = min(worked, now - self._since)
            up_to = limits[instance.bucket]
            self.spans.append(EngineSpan(instance.id, up_to, seconds(self._since), seconds(now), seconds(busy)))
        self._since = now
