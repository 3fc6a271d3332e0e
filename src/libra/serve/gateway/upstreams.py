"""The engines behind the gateway, and their turns in flight.

Invariant: an engine is in service from a passed health check until it fails a turn or a check, or leaves. An engine
that fails `STRIKES` turns which another engine then serves is out of service for `_REST_SECONDS`. Turns that wait for
an engine wake up whenever an engine returns to service or a turn ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from types import TracebackType
from typing import Self

from aiohttp import ClientResponse, web

from libra.live.pace import Pace
from libra.live.server import LiveServer, ServerPaces
from libra.live.work import HeldTurn, Took
from libra.route.loads import IndexedFleet
from libra.route.policy import Fleet
from libra.serve.gateway.config import UpstreamSection
from libra.serve.gateway.engine_connections import EngineAddress
from libra.serve.gateway.traced import sendable

STRIKES = 3  # consecutive turns that an engine fails with status 500 and another engine serves
_REST_SECONDS = 10.0  # out of service after these strikes
_LOG = logging.getLogger(__name__)


class Fault(Enum):
    """Kinds of failure, by their effect on the engine."""

    GONE = auto()  # the engine leaves service
    ERROR = auto()  # the engine stays, unless other engines serve the turns that it fails
    BUSY = auto()  # the engine stays, since only its queue is full
    SILENT = auto()  # the engine stays, since it is healthy; the turn is not retried


@dataclass(frozen=True, slots=True)
class TurnFailure:
    """Reason why a turn got no answer from an engine. It is not an exception, since a stored exception and its frames
    would refer to each other."""

    message: str
    fault: Fault
    answer: web.Response | None = None  # the engine's own error response


def untraced(error: BaseException | None) -> None:
    """Drop the frames of an error and its causes. aiohttp's client keeps errors in some of these frames, and the
    resulting cycles would rarely be collected here."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def whole_of(answer: ClientResponse, most: int) -> bytes:
    """The body of an answer. Raises `ValueError` if it has more than `most` bytes."""
    body = bytearray()
    while piece := await answer.content.readany():
        body += piece
        if len(body) > most:
            raise ValueError(f"an answer of more than {most} bytes")
    return bytes(body)


class Upstream(LiveServer):
    """One engine behind the gateway."""

    def __init__(self, section: UpstreamSection, pace: Pace) -> None:
        super().__init__(section.name, section.bucket, section.max_model_len or 0, pace)  # 0: unknown; not in service
        self.section = section
        self.address = EngineAddress.of(section.root)
        self.healthy = False
        self.problem: str | None = None  # why it is out of service; None also before the first check
        self.look = asyncio.Event()  # set to have its health checked soon
        self.turns = 0  # answered turns
        self.attempts: set[Attempt] = set()
        self.last_byte = 0.0  # time on the event loop's clock at which it last sent anything
        self.checked = -_REST_SECONDS  # time of its last health check
        self.rests_until = 0.0
        self._strikes = 0

    @property
    def in_flight(self) -> int:
        return len(self.attempts)

    def served(self) -> None:
        """Record that the engine served a turn."""
        self._strikes = 0

    def strike(self) -> bool:
        """Count a turn that this engine failed and another engine served. Returns True if this engine must leave
        service."""
        self._strikes += 1
        if self._strikes < STRIKES:
            return False
        self._strikes = STRIKES - 1  # after the rest, one more strike is enough
        self.rests_until = asyncio.get_running_loop().time() + _REST_SECONDS
        return True

    def authorization(self, request: web.Request | None) -> dict[str, str]:
        """The Authorization header for the engine: its own token, or if it has none, the client's header."""
        value = self.section.authorization()
        if value is None and request is not None and (own := request.headers.get("Authorization")) is not None:
            value = sendable("Authorization", own)
        return {} if value is None else {"Authorization": value}


class Attempt:
    """One turn on one engine, as an async context around all waits for the engine."""

    def __init__(self, upstreams: Upstreams, engine: Upstream, context: int) -> None:
        self.engine = engine
        self.failure: TurnFailure | None = None  # reason for the abort
        self._now = asyncio.get_running_loop().time
        self.last_byte = self._now()  # time at which the engine last sent anything of this turn
        self._upstreams, self._context, self._scope = upstreams, context, asyncio.timeout(None)
        self._held: HeldTurn | None = None
        self.took: Took | None = None  # set at the end

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self.engine.attempts.add(self)
        self._held = self.engine.begun(self._context)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.attempts.discard(self)
        assert self._held is not None
        self.took = self.engine.ended(self._held)
        self._upstreams.announce()
        await self._scope.__aexit__(kind, error, trace)

    def touch(self) -> None:
        """Record that the engine has just sent part of the turn."""
        self.last_byte = self.engine.last_byte = self._now()

    def abort(self, failure: TurnFailure) -> None:
        """End the context with `TimeoutError`; `failure` is the reason."""
        if self.failure is None:
            self.failure = failure
            self._scope.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class TurnFleet:
    """A `route.policy.Fleet` for one turn."""

    instances: tuple[Upstream, ...]
    limits: tuple[int, ...]
    turn_tokens: int


class Upstreams:
    """All engines, and the engines in service."""

    def __init__(self, sections: Iterable[UpstreamSection], limits: tuple[int, ...] | None) -> None:
        self._paces = ServerPaces()
        self.all = {section.name: self._upstream(section) for section in sections}
        self.instances: tuple[Upstream, ...] = ()
        self._limits = limits
        self._changed = asyncio.Event()
        self.refresh()

    @property
    def limits(self) -> tuple[int, ...]:
        """Largest final context of each bucket. Without configured limits there is one bucket."""
        return self._limits or (max(1, self.longest),)

    def fleet(self, turn_tokens: int, without: Collection[Upstream] = ()) -> Fleet:
        """The engines in service except `without`, with the room that a turn needs. The value is valid until the next
        call."""
        if without:
            left = tuple(engine for engine in self.instances if engine not in without)
            return TurnFleet(left, self.limits, turn_tokens)
        self._fleet.turn_tokens = turn_tokens
        return self._fleet

    def join(self, section: UpstreamSection) -> Upstream:
        """Add an engine. It enters service once it passes a check."""
        engine = self.all[section.name] = self._upstream(section)
        self.refresh()
        return engine

    def _upstream(self, section: UpstreamSection) -> Upstream:
        return Upstream(section, Pace(like=self._paces.of_kind(section.bucket)))

    def answered(self, attempt: Attempt, generated_tokens: int) -> None:
        """Learn the engine's pace from a turn that it has answered."""
        assert attempt.took is not None
        if self._paces.observe(attempt.engine, generated_tokens, attempt.took, self.all.values()):
            self.refresh()

    def leave(self, engine: Upstream) -> None:
        """Send the engine no more turns. Its turns in flight continue."""
        del self.all[engine.id]
        self.refresh()

    def mark_healthy(self, engine: Upstream) -> None:
        """Put an engine in service; no effect if the engine is in service already."""
        problem, engine.problem = engine.problem, None
        if engine.healthy:
            return
        engine.healthy = True
        engine.look.clear()
        self.refresh()
        if problem is not None:
            _LOG.warning("engine %s is in service", engine.id)

    def mark_lost(self, engine: Upstream, problem: str) -> bool:
        """Take an engine out of service. Returns False if it was not in service."""
        known, engine.problem = engine.problem, problem
        if engine.healthy or known is None:
            _LOG.warning("engine %s is out of service: %s", engine.id, problem)
        if not engine.healthy:
            return False
        engine.healthy = False
        engine.look.set()
        self.refresh()
        return True

    def refresh(self) -> None:
        """Update the set of engines after a change of one of them."""
        self.longest = max((engine.capacity_tokens for engine in self.all.values()), default=0)
        self.instances = tuple(each for each in self.all.values() if each.healthy)
        self._fleet = IndexedFleet(self.instances, self.limits, 0)
        self.announce()

    async def changed(self) -> None:
        """Wait until an engine returns to service or a turn ends."""
        await self._changed.wait()

    def announce(self) -> None:
        """Wake up the waiters of `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()
