"""The engines behind the gateway, as the router sees them.

Invariant: an engine is in the fleet from the moment at which it says that it is well until it fails a request or a
look; whoever waits for an engine is woken by each that comes back, and by each request that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from libra.serve.gateway.gateway_file import EngineSection


class EngineBehind:
    """One server. A live `route.policy.Instance`."""

    __slots__ = ("bucket", "capacity_tokens", "failures", "heard", "id", "in_flight", "load_tokens", "section", "turns")

    token_seconds: float | None = None  # the server does not say

    def __init__(self, section: EngineSection) -> None:
        self.section = section
        self.id, self.bucket, self.capacity_tokens = section.name, section.bucket, section.max_model_len
        self.load_tokens = 0  # contexts of the turns that it has
        self.in_flight = self.turns = self.failures = 0
        self.heard = 0.0  # when something of an answer came, by the event loop's clock


class Engines:
    """A live `route.policy.Fleet`: of all engines those that are in service."""

    def __init__(self, sections: Iterable[EngineSection], limits: tuple[int, ...], turn_tokens: int) -> None:
        self.all = {section.name: EngineBehind(section) for section in sections}
        self.limits, self.turn_tokens = limits, turn_tokens
        self._well: dict[str, None] = {}
        self.instances: tuple[EngineBehind, ...] = ()
        self._changed = asyncio.Event()

    def is_well(self, name: str) -> bool:
        return name in self._well

    def come(self, name: str) -> None:
        if name not in self._well:
            self._well[name] = None
            self._set_instances()

    def go(self, name: str) -> bool:
        """False: it had gone before."""
        if name not in self._well:
            return False
        del self._well[name]
        self.all[name].failures += 1
        self._set_instances()
        return True

    def began(self, engine: EngineBehind, context: int) -> None:
        engine.in_flight += 1
        engine.load_tokens += context

    def ended(self, engine: EngineBehind, context: int) -> None:
        engine.in_flight -= 1
        engine.load_tokens -= context
        self._announce()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def _set_instances(self) -> None:
        self.instances = tuple(engine for name, engine in self.all.items() if name in self._well)
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
