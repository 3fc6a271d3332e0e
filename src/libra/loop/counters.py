"""How much the engines did between two looks.

Invariant: an engine that is new, or started again, counts from zero; one that is gone takes what it did with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from libra.backends.launch.launcher import WorkerLink
from libra.loop.fleet import Instance
from libra.loop.replanning import EngineWork


class EngineCounters:
    def __init__(self) -> None:
        self._seen: dict[WorkerLink, EngineWork] = {}  # a slot's next engine is another one
        self.busiest_seconds = 0.0  # of any engine, in the last look

    def gained(self, instances: Iterable[Instance]) -> EngineWork:
        """Sums over all engines since the last call."""
        zero = EngineWork(0.0, 0, 0, 0, 0)
        now = {
            entry.handle.link: EngineWork(
                entry.handle.busy_seconds,
                entry.handle.iterations,
                entry.handle.generated_tokens,
                entry.handle.prefilled_tokens,
                entry.handle.finished_turns,
            )
            for entry in instances
        }
        gains = [(work, self._seen.get(link, zero)) for link, work in now.items()]
        self._seen = now
        self.busiest_seconds = max((new.busy_seconds - old.busy_seconds for new, old in gains), default=0.0)
        return EngineWork(
            sum(new.busy_seconds - old.busy_seconds for new, old in gains),
            sum(new.iterations - old.iterations for new, old in gains),
            sum(new.generated_tokens - old.generated_tokens for new, old in gains),
            sum(new.prefilled_tokens - old.prefilled_tokens for new, old in gains),
            sum(new.turns - old.turns for new, old in gains),
        )
