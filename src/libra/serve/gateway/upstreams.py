"""The engines behind the gateway, as the router sees them, and the turns that each has.

Invariant: an engine is in service from the moment at which it says that it is well until it fails a request or a look;
whoever waits for an engine is woken by each that comes back, and by each turn that ends.
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

    __slots__ = ("attempts", "bucket", "capacity_tokens", "failures", "heard", "id", "load_tokens", "section", "turns")

    token_seconds: float | None = None  # the server does not say

    def __init__(self, section: UpstreamSection) -> None:
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

    __slots__ = ("_context", "_scope", "_upstreams", "engine", "error", "heard")

    def __init__(self, upstreams: Upstreams, engine: Upstream, context: int) -> None:
        self.engine = engine
        self.error: Exception | None = None  # why it was cut
        self.heard = asyncio.get_running_loop().time()  # when the engine last sent anything of this turn
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

    def hear(self) -> None:
        """The engine has sent something of the turn."""
        self.heard = self.engine.heard = asyncio.get_running_loop().time()

    def cut(self, error: Exception) -> None:
        """Stop waiting: the context ends with TimeoutError, and `error` says why."""
        if self.error is None:
            self.error = error
            self._scope.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class TurnFleet:
    """A `route.policy.Fleet` for one turn, which says itself how much room it needs."""

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
        self._well: dict[str, None] = {}
        self._changed = asyncio.Event()

    def fleet(self, turn_tokens: int) -> TurnFleet:
        return TurnFleet(self.instances, self.limits, turn_tokens)

    def is_well(self, name: str) -> bool:
        return name in self._well

    def come(self, name: str) -> None:
        """It is in service."""
        if name not in self._well:
            self._well[name] = None
            self._set_instances()

    def go(self, name: str) -> bool:
        """It is out of service. False: it was before."""
        if name not in self._well:
            return False
        del self._well[name]
        self.all[name].failures += 1
        self._set_instances()
        return True

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def announce(self) -> None:
        """Wake who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _set_instances(self) -> None:
        self.instances = tuple(engine for name, engine in self.all.items() if name in self._well)
        self.announce()
