"""Health checks of the engines, and timeouts of turns on silent engines.

Invariant: no turn waits for ever. An unhealthy engine that sends nothing for `engine_timeout_seconds` loses all its
turns. A healthy engine that sends nothing of a turn for `turn_timeout_seconds` loses this turn. If the longest context
of an engine is unknown, the gateway queries it before the engine enters service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import ClientError, ClientTimeout

from libra.serve.answers import decoded
from libra.serve.gateway.config import GatewayConfig
from libra.serve.gateway.engine_client import EngineClient
from libra.serve.gateway.upstreams import Fault, TurnFailure, Upstream, Upstreams, untraced, whole_of

RECHECK_SECONDS = 1.0  # between two checks of an unhealthy engine
_CHECK_SECONDS = 10.0  # between two checks of a healthy engine, whose turns show a failure sooner
_CHECK_TIMEOUT = 2.0  # seconds
_ABORT_SECONDS = 1.0  # longest time between two searches for turns past their timeout
_LARGEST_LIST = 2**20  # bytes of a list of models


class _Model(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class HealthMonitor:
    """Checks the engines, and calls `mark_lost` with each engine that fails a check, and the problem."""

    def __init__(
        self,
        config: GatewayConfig,
        upstreams: Upstreams,
        client: EngineClient,
        mark_lost: Callable[[Upstream, str], None],
    ) -> None:
        self._config, self._upstreams, self._client, self._mark_lost = config, upstreams, client, mark_lost
        self._loop = asyncio.get_running_loop()
        self._watched: dict[Upstream, asyncio.Task[None]] = {}
        self._aborting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Check every engine once, and continue to check them."""
        engines = list(self._upstreams.all.values())
        await asyncio.gather(*map(self.check, engines))
        for index, engine in enumerate(engines):
            self.watch(engine, _CHECK_SECONDS * (index + 1) / len(engines))  # spread over the period
        self._aborting = asyncio.create_task(self._keep_aborting())

    async def stop(self) -> None:
        tasks = [*self._watched.values(), *([] if self._aborting is None else [self._aborting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, engine: Upstream, first: float = _CHECK_SECONDS) -> None:
        """Check an engine until it has left and its turns have ended. The first check is after `first` seconds."""
        self._watched[engine] = asyncio.create_task(self._keep_checking(engine, first))

    def doubt(self, engine: Upstream) -> None:
        """Check an engine soon, unless it was just checked."""
        if self._loop.time() - engine.checked >= RECHECK_SECONDS:
            engine.look.set()

    async def _keep_checking(self, engine: Upstream, first: float) -> None:
        await self._pause(engine, first)
        while self._upstreams.all.get(engine.id) is engine or engine.attempts:
            await self.check(engine)
            await self._pause(engine, _CHECK_SECONDS)
        del self._watched[engine]

    async def _pause(self, engine: Upstream, seconds: float) -> None:
        """Wait for the next check: `seconds`, or `RECHECK_SECONDS` for an unhealthy or doubted engine."""
        if engine.healthy:
            try:
                async with asyncio.timeout(seconds):
                    await engine.look.wait()
            except TimeoutError:
                return
            if engine.healthy:  # `doubt` ended the wait
                engine.look.clear()
                return
        await asyncio.sleep(RECHECK_SECONDS)

    async def check(self, engine: Upstream) -> None:
        """Query an engine's /health. A busy engine may answer late, so bytes of its turns that arrive meanwhile count
        as an answer."""
        began = engine.checked = self._loop.time()
        try:
            async with self._client.session.get(
                engine.section.health,
                timeout=ClientTimeout(total=_CHECK_TIMEOUT),
                headers=engine.authorization(None),
                allow_redirects=False,
            ) as answer:
                problem = None if answer.status < 500 else f"/health answers with status {answer.status}"
        except TimeoutError:
            problem = None if engine.last_byte >= began else f"/health is silent for {_CHECK_TIMEOUT:g} s"
        except (ClientError, OSError, ValueError) as error:  # ValueError: the answer is not HTTP
            untraced(error)
            problem = f"/health: {error or type(error).__name__}"
        if problem is None and not engine.capacity_tokens:
            problem = await self._measure(engine)
        if problem is not None:
            self._mark_lost(engine, problem)
            return
        engine.last_byte = self._loop.time()
        if engine.last_byte >= engine.rests_until:
            self._upstreams.mark_healthy(engine)

    async def _measure(self, engine: Upstream) -> str | None:
        """Query and set the engine's longest context. Returns the reason if it remains unknown, otherwise None."""
        url = f"{engine.section.url}/models"
        try:
            async with self._client.session.get(
                url,
                timeout=ClientTimeout(total=_CHECK_TIMEOUT),
                headers={"Accept-Encoding": "identity", **engine.authorization(None)},
                allow_redirects=False,
            ) as answer:
                told = decoded(_models, await whole_of(answer, _LARGEST_LIST))
        except (ClientError, OSError, ValueError, TimeoutError) as error:
            untraced(error)
            return f"{url} does not list its models: {error or type(error).__name__}"
        longest = min((model.max_model_len or 0 for model in told.data), default=0)
        if longest < 1:
            return f"{url} reports no max_model_len: give it in the file, or to POST /workers"
        engine.capacity_tokens = longest
        self._upstreams.refresh()
        return None

    async def _keep_aborting(self) -> None:
        engine_timeout, turn_timeout = self._config.engine_timeout_seconds, self._config.turn_timeout_seconds
        while True:
            await asyncio.sleep(min(_ABORT_SECONDS, engine_timeout / 4, turn_timeout / 4))
            now = self._loop.time()
            for engine in list(self._watched):
                silent = now - engine.last_byte
                stopped = not engine.healthy and silent >= engine_timeout
                for attempt in list(engine.attempts):
                    of_turn = now - attempt.last_byte
                    if stopped:
                        message = f"engine {engine.id} has sent nothing for {silent:.0f} s"
                        attempt.abort(TurnFailure(message, Fault.GONE))
                    elif of_turn >= turn_timeout:
                        attempt.abort(
                            TurnFailure(
                                f"engine {engine.id} has sent nothing of the turn for {of_turn:.0f} s, more than"
                                " turn_timeout_seconds",
                                Fault.SILENT,
                            )
                        )
