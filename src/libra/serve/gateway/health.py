"""Health checks of the engines, and timeouts of the turns that they have.

Invariant: no turn waits for ever. An unhealthy engine that sends nothing at all for `engine_timeout_seconds` loses all
its turns; a healthy one that sends nothing of a turn for `turn_timeout_seconds` loses that turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import ClientError, ClientSession, ClientTimeout

from libra.serve.gateway.config import GatewayConfig
from libra.serve.gateway.relay import EngineLostError, TurnOverdueError, authorization
from libra.serve.gateway.upstreams import Upstream, Upstreams

RECHECK_SECONDS = 1.0  # between two checks of an unhealthy engine
_CHECK_SECONDS = 10.0  # between two checks of a healthy one: if it fails, a turn will say so sooner
_CHECK_TIMEOUT = 2.0
_ABORT_SECONDS = 1.0  # between two searches for turns past their timeout, at most


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
        await asyncio.sleep(first)
        while True:
            await self._check(engine)
            await asyncio.sleep(_CHECK_SECONDS if self._upstreams.is_healthy(engine.id) else RECHECK_SECONDS)

    async def _check(self, engine: Upstream) -> None:
        """A busy engine may answer late; bytes of its turns that arrive meanwhile count as an answer."""
        began = self._loop.time()
        try:
            async with self._session.get(
                engine.section.health,
                timeout=ClientTimeout(total=_CHECK_TIMEOUT),
                headers=authorization(engine, None),
                allow_redirects=False,
            ) as answer:
                healthy = answer.status < 500
        except TimeoutError:
            healthy = engine.last_byte >= began
        except (ClientError, OSError, ValueError):  # ValueError: an answer that is no HTTP
            healthy = False
        if healthy:
            engine.last_byte = self._loop.time()
            self._upstreams.mark_healthy(engine.id)
        else:
            self._mark_lost(engine)

    async def _keep_aborting(self) -> None:
        engine_timeout, turn_timeout = self._config.engine_timeout_seconds, self._config.turn_timeout_seconds
        while True:
            await asyncio.sleep(min(_ABORT_SECONDS, engine_timeout / 4, turn_timeout / 4))
            now = self._loop.time()
            for engine in self._upstreams.all.values():
                stopped = not self._upstreams.is_healthy(engine.id) and now - engine.last_byte >= engine_timeout
                for attempt in list(engine.attempts):
                    of_engine, of_turn = now - engine.last_byte, now - attempt.last_byte
                    if stopped:
                        attempt.abort(EngineLostError(f"engine {engine.id} has sent nothing for {of_engine:.0f} s"))
                    elif of_turn >= turn_timeout:
                        silent = f"{of_turn:.0f} s, more than turn_timeout_seconds"
                        attempt.abort(TurnOverdueError(f"engine {engine.id} has sent nothing of the turn for {silent}"))
