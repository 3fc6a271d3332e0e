"""The engines behind the gateway, their turns in flight, and their health.

Invariant: an engine is in service from a passed health check until it fails a turn or a check. Turns that wait for an
engine are woken whenever one returns to service or a turn ends. No turn waits for ever: an unhealthy engine that sends
nothing at all for `engine_timeout_seconds` loses all its turns, a healthy one that sends nothing of a turn for
`turn_timeout_seconds` loses that turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from libra.serve.answers import RefusedRequest
from libra.serve.gateway.config import GatewayConfig, UpstreamSection

RECHECK_SECONDS = 1.0  # between two checks of an unhealthy engine
_CHECK_SECONDS = 10.0  # between two checks of a healthy one: if it fails, a turn will say so sooner
_CHECK_TIMEOUT = 2.0
_ABORT_SECONDS = 1.0  # between two searches for turns past their timeout, at most


@dataclass(frozen=True, slots=True)
class TurnFailure:
    """Reason why a turn got no answer from an engine. It is a value, since an exception that is kept refers to the
    frames that it passed through, and they to it."""

    message: str
    of_engine: bool = True  # False: the engine is healthy, but silent about this turn
    answer: web.Response | None = None  # the engine's own error response


def untraced(error: BaseException | None) -> None:
    """Drop the frames that an error and its causes refer to: aiohttp's client keeps errors in some of them, and garbage
    that refers to itself is rarely collected here."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Upstream:
    """One server. A live `route.policy.Instance`."""

    token_seconds: float | None = None  # the server does not say
    recall_rate = 0.0  # nor does it lend
    prompt_wait_seconds = 0.0  # it computes its prompts itself

    def __init__(self, section: UpstreamSection) -> None:
        self.section = section
        self.id, self.bucket, self.capacity_tokens = section.name, section.bucket, section.max_model_len
        self.healthy = False
        self.lost = asyncio.Event()  # set while it is out of service
        self.load_tokens = 0  # contexts of the turns in flight
        self.turns = 0  # answered
        self.attempts: set[Attempt] = set()
        self.last_byte = 0.0  # when it last sent anything, on the event loop's clock

    @property
    def in_flight(self) -> int:
        return len(self.attempts)

    def authorization(self, request: web.Request | None) -> dict[str, str]:
        """The header with its own token, or else the client's header."""
        value = self.section.authorization()
        if value is None and request is not None:
            value = request.headers.get("Authorization")
            if value is not None and not (value.isascii() and value.isprintable()):
                raise RefusedRequest("the header Authorization holds more than printable ASCII characters", 400)
        return {} if value is None else {"Authorization": value}


class Attempt:
    """One turn on one engine: an async context around all waiting for the engine."""

    def __init__(self, upstreams: Upstreams, engine: Upstream, context: int) -> None:
        self.engine = engine
        self.failure: TurnFailure | None = None  # why it was aborted
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
        """Note that the engine has just sent something of the turn."""
        self.last_byte = self.engine.last_byte = asyncio.get_running_loop().time()

    def abort(self, failure: TurnFailure) -> None:
        """End the context with TimeoutError; `failure` holds the reason."""
        if self.failure is None:
            self.failure = failure
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
        self._changed = asyncio.Event()

    def fleet(self, turn_tokens: int) -> TurnFleet:
        return TurnFleet(self.instances, self.limits, turn_tokens)

    def mark(self, engine: Upstream, healthy: bool) -> bool:
        """Put an engine in service, or take it out. False: it already was."""
        if engine.healthy == healthy:
            return False
        engine.healthy = healthy
        if healthy:
            engine.lost.clear()
        else:
            engine.lost.set()
        self.instances = tuple(each for each in self.all.values() if each.healthy)
        self.announce()
        return True

    async def changed(self) -> None:
        """Wait until an engine returns to service or a turn ends."""
        await self._changed.wait()

    def announce(self) -> None:
        """Wake the waiters of `changed`."""
        self._changed.set()
        self._changed = asyncio.Event()


class HealthMonitor:
    """Calls `mark_lost` with each engine that fails a check."""

    def __init__(
        self, config: GatewayConfig, upstreams: Upstreams, session: ClientSession, mark_lost: Callable[[Upstream], None]
    ) -> None:
        self._config, self._upstreams, self._session, self._mark_lost = config, upstreams, session, mark_lost
        self._loop = asyncio.get_running_loop()

    async def start(self) -> list[asyncio.Task[None]]:
        """Check every engine once; the tasks returned go on checking."""
        engines = list(self._upstreams.all.values())
        await asyncio.gather(*map(self._check, engines))
        spread = (_CHECK_SECONDS * (index + 1) / len(engines) for index in range(len(engines)))  # not all at once
        tasks = [asyncio.create_task(self._keep_checking(*it)) for it in zip(engines, spread, strict=True)]
        return [*tasks, asyncio.create_task(self._keep_aborting())]

    async def _keep_checking(self, engine: Upstream, first: float) -> None:
        await self._pause(engine, first)
        while True:
            await self._check(engine)
            await self._pause(engine, _CHECK_SECONDS)

    async def _pause(self, engine: Upstream, seconds: float) -> None:
        """Wait between two checks: `seconds` while the engine is in service, then or else `RECHECK_SECONDS`."""
        if engine.healthy:
            try:
                async with asyncio.timeout(seconds):
                    await engine.lost.wait()
            except TimeoutError:
                return
        await asyncio.sleep(RECHECK_SECONDS)

    async def _check(self, engine: Upstream) -> None:
        """A busy engine may answer late; bytes of its turns that arrive meanwhile count as an answer."""
        began = self._loop.time()
        try:
            async with self._session.get(
                engine.section.health,
                timeout=ClientTimeout(total=_CHECK_TIMEOUT),
                headers=engine.authorization(None),
                allow_redirects=False,
            ) as answer:
                healthy = answer.status < 500
        except TimeoutError:
            healthy = engine.last_byte >= began
        except (ClientError, OSError, ValueError) as error:  # ValueError: an answer that is no HTTP
            untraced(error)
            healthy = False
        if healthy:
            engine.last_byte = self._loop.time()
            self._upstreams.mark(engine, healthy=True)
        else:
            self._mark_lost(engine)

    async def _keep_aborting(self) -> None:
        engine_timeout, turn_timeout = self._config.engine_timeout_seconds, self._config.turn_timeout_seconds
        while True:
            await asyncio.sleep(min(_ABORT_SECONDS, engine_timeout / 4, turn_timeout / 4))
            now = self._loop.time()
            for engine in self._upstreams.all.values():
                silent = now - engine.last_byte
                stopped = not engine.healthy and silent >= engine_timeout
                for attempt in list(engine.attempts):
                    of_turn = now - attempt.last_byte
                    if stopped:
                        attempt.abort(TurnFailure(f"engine {engine.id} has sent nothing for {silent:.0f} s"))
                    elif of_turn >= turn_timeout:
                        attempt.abort(
                            TurnFailure(
                                f"engine {engine.id} has sent nothing of the turn for {of_turn:.0f} s, more than"
                                " turn_timeout_seconds",
                                of_engine=False,
                            )
                        )
