"""The engines behind the gateway, and their turns in flight.

Invariant: an engine is in service from a passed health check until it fails a turn or a check. Turns that wait for an
engine are woken whenever one returns to service or a turn ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from libra.serve.gateway.config import UpstreamSection


class Upstream:
    """One server. A live `route.policy.Instance`."""

    __slots__ = (
        "attempts",
        "bucket",
        "capacity_tokens",
        "failures",
        "id",
        "last_byte",
        "load_tokens",
        "section",
        "turns",
    )

    token_seconds: float | None = None  # the server does not say

    def __init__(self, section: UpstreamSection) -> None:
        self.section = section
        self.id, self.bucket, self.capacity_tokens = section.name, section.bucket, section.max_model_len
        self.load_tokens = 0  # contexts of the turns in flight
        self.turns = self.failures = 0
        self.attempts: set[Attempt] = set()
        self.last_byte = 0.0  # when it last sent anything, on the event loop's clock

    @property
    def in_flight(self) -> int:
        return len(self.attempts)


class Attempt:
    """One turn on one engine: an async context around all waiting for the engine."""

    __slots__ = ("_context", "_scope", "_upstreams", "engine", "error", "last_byte")

    def __init__(self, upstreams: Upstreams, engine: Upstream, context: int) -> None:
        self.engine = engine
        self.error: Exception | None = None  # why it was aborted
        self.last_byte = asyncio.get_running_loop().time()  # when the engine last sent anything of this turn
        self._upstreams, self._context, self._scope = upstreams, context, asyncio.timeout(None)

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
        self._upstreams.announce()
        await self._scope.__aexit__(kind, error, trace)

    def touch(self) -> None:
        """The engine has just sent something of the turn."""
        self.last_byte = self.engine.last_byte = asyncio.get_running_loop().time()

    def abort(self, error: Exception) -> None:
        """End the context with TimeoutError; `error` holds the reason."""
        if self.error is None:
            self.error = error
            self._scope.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class TurnFleet:
    """A `route.policy.Fleet` for one turn, with the room that this turn needs."""

    instances: tuple[Upstream, ...]
    limits: tuple[int, ...]
    turn_tokens: int


class Upstreams:
    """All engines, and those of them that are in service."""

    def __init__(self, sections: Iterable[UpstreamSection], limits: tuple[int, ...]) -> None:
        self.all = {section.name: Upstream(section) for section in sections}
        self.limits = limits
        self.longest = max(engine.capacity_tokens for engine in self.all.values())
        self.instances: tuple[Upstream, ...] = ()
        self._healthy: dict[str, None] = {}
        self._changed = asyncio.Event()

    def fleet(self, turn_tokens: int) -> TurnFleet:
        return TurnFleet(self.instances, self.limits, turn_tokens)

    def is_healthy(self, name: str) -> bool:
        return name in self._healthy

    def mark_healthy(self, name: str) -> None:
        """Put it in service."""
        if name not in self._healthy:
            self._healthy[name] = None
            self._set_instances()

    def mark_unhealthy(self, name: str) -> bool:
        """Take it out of service. False: it already was."""
        if name not in self._healthy:
            return False
        del self._healthy[name]
        self.all[name].failures += 1
        self._set_instances()
        return True

    async def changed(self) -> None:
        """Wait until an engine returns to service or a turn ends."""
        await self._changed.wait()

    def announce(self) -> None:
        """Wake the waiters of `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _set_instances(self) -> None:
        self.instances = tuple(engine for name, engine in self.all.items() if name in self._healthy)
        self.announce()
