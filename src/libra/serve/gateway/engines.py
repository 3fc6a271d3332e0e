"""The engines behind the gateway, as the router sees them.

Invariant: an engine is in the fleet from the moment at which it says that it is well until it fails a request or a
look; whoever waits for an engine is woken by each that comes back, and by each request that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from libra.serve.gateway.gateway_file import EngineSection


class EngineBehind:
    """One server. A live `route.policy.Instance`."""

    __slots__ = ("attempts", "bucket", "capacity_tokens", "failures", "heard", "id", "load_tokens", "section", "turns")

    token_seconds: float | None = None  # the server does not say

    def __init__(self, section: EngineSection) -> None:
        self.section = section
        self.id, self.bucket, self.capacity_tokens = section.name, section.bucket, section.max_model_len
        self.load_tokens = 0  # contexts of the turns that it has
        self.turns = self.failures = 0
        self.attempts: set[Attempt] = set()
        self.heard = 0.0  # when it last sent anything, by the event loop's clock

    @property
    def in_flight(self) -> int:
        return len(self.attempts)


class Attempt:
    """One turn on one engine: an async context around everything that is awaited of the engine."""

    __slots__ = ("_context", "_engines", "_scope", "engine", "error", "heard")

    def __init__(self, engines: Engines, engine: EngineBehind, context: int) -> None:
        self.engine = engine
        self.heard = asyncio.get_running_loop().time()  # when the engine last sent anything of this turn
        self._engines, self._context, self._scope = engines, context, asyncio.timeout(None)
        self.error: Exception | None = None

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self.engine.attempts.add(self)
        self.engine.load_tokens += self._context
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.attempts.discard(self)
        self.engine.load_tokens -= self._context
        self._engines.announce()
        await self._scope.__aexit__(kind, error, trace)

    def hear(self, now: float) -> None:
        self.heard = self.engine.heard = now

    def cut(self, error: Exception) -> None:
        """Stop waiting: the context ends with TimeoutError, and `error` says why."""
        if self.error is None:
            self.error = error
            self._scope.reschedule(asyncio.get_running_loop().time())


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

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def _set_instances(self) -> None:
        self.instances = tuple(engine for name, engine in self.all.items() if name in self._well)
        self.announce()

    def announce(self) -> None:
        """Wake who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
