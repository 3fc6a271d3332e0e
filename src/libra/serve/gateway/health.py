"""Whether engines are well, and what becomes of turns whose engine says nothing.

Invariant: no turn waits for ever. An engine that sends nothing to anybody for `engine_timeout_seconds` loses its turns;
one that is well, but sends nothing of a turn for `turn_timeout_seconds`, loses that turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import ClientError, ClientSession, ClientTimeout

from libra.serve.gateway.config import GatewayConfig
from libra.serve.gateway.relay import EngineLostError, TurnOverdueError, authorization
from libra.serve.gateway.upstreams import Upstream, Upstreams

LOOK_SICK = 1.0  # seconds between two looks at an engine that is not well: it may be back soon
_LOOK_WELL = 10.0  # and at one that is: it would fail a turn soon if it were not
_LOOK_DEADLINE = 2.0  # seconds for an answer
_CUT_INTERVAL = 1.0  # seconds between two looks at turns that wait too long, or less where little is too long


class HealthMonitor:
    """`lose` is told of each engine that fails a look."""

    def __init__(
        self, config: GatewayConfig, upstreams: Upstreams, session: ClientSession, lose: Callable[[Upstream], None]
    ) -> None:
        self._config, self._upstreams, self._session, self._lose = config, upstreams, session, lose
        self._loop = asyncio.get_running_loop()

    async def start(self) -> list[asyncio.Task[None]]:
        """Look at all engines once, and go on doing so in the tasks that this returns."""
        engines = list(self._upstreams.all.values())
        await asyncio.gather(*map(self._look_at, engines))
        spread = (_LOOK_WELL * (index + 1) / len(engines) for index in range(len(engines)))  # not all at once
        tasks = [asyncio.create_task(self._keep_looking(*it)) for it in zip(engines, spread, strict=True)]
        return [*tasks, asyncio.create_task(self._keep_cutting())]

    async def _keep_looking(self, engine: Upstream, first: float) -> None:
        await asyncio.sleep(first)
        while True:
            await self._look_at(engine)
            await asyncio.sleep(_LOOK_WELL if self._upstreams.is_well(engine.id) else LOOK_SICK)

    async def _look_at(self, engine: Upstream) -> None:
        """One that has much to do may say late that it is well; what it generates meanwhile says so, too."""
        began = self._loop.time()
        try:
            async with self._session.get(
                engine.section.health,
                timeout=ClientTimeout(total=_LOOK_DEADLINE),
                headers=authorization(engine, None),
                allow_redirects=False,
            ) as answer:
                well = answer.status < 500
        except TimeoutError:
            well = engine.heard >= began
        except (ClientError, OSError, ValueError):  # ValueError: an answer that is no HTTP
            well = False
        if well:
            engine.heard = self._loop.time()
            self._upstreams.come(engine.id)
        else:
            self._lose(engine)

    async def _keep_cutting(self) -> None:
        engine_timeout, turn_timeout = self._config.engine_timeout_seconds, self._config.turn_timeout_seconds
        while True:
            await asyncio.sleep(min(_CUT_INTERVAL, engine_timeout / 4, turn_timeout / 4))
            now = self._loop.time()
            for engine in self._upstreams.all.values():
                stopped = not self._upstreams.is_well(engine.id) and now - engine.heard >= engine_timeout
                for attempt in list(engine.attempts):
                    of_engine, of_turn = now - engine.heard, now - attempt.heard
                    if stopped:
                        attempt.cut(EngineLostError(f"engine {engine.id} has sent nothing for {of_engine:.0f} s"))
                    elif of_turn >= turn_timeout:
                        silent = f"{of_turn:.0f} s, more than turn_timeout_seconds"
                        attempt.cut(TurnOverdueError(f"engine {engine.id} has sent nothing of the turn for {silent}"))
