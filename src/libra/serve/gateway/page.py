"""The live page of a gateway, on a port of its own at 127.0.0.1.

Invariant: the gateway's event loop only copies values. A separate process renders the page from the copy, and only
while a browser shows the page. Engines are queried for their gauges only while a browser shows the page.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress

from libra.config.listeners import METRICS
from libra.live.trajectories import LiveTrajectory
from libra.report.router_page import router_page
from libra.report.router_view import DecisionView, EndedLength, EngineView, RouterView, SessionView, TrafficSample
from libra.serve.gateway.engine_gauges import EngineGauges, gauges_of
from libra.serve.gateway.recent import Recent
from libra.serve.gateway.server import Gateway
from libra.serve.gateway.upstreams import Upstream
from libra.serve.http import serving
from libra.serve.live_page import alive, live_application, page_maker

_LOOK_SECONDS = 2.0  # between two samples
_WINDOW = 5  # samples over which rates are averaged
_SAMPLES = 600  # samples that are kept
_WATCHED_SECONDS = 10.0  # time without a request after which no browser shows the page
_SESSIONS = 40  # sessions that the page shows


class RouterPage:
    """The page of one gateway; it implements `live_page.LivePage`."""

    trouble = ""  # a view is always available

    def __init__(self, gateway: Gateway, recent: Recent, policy: str, maker: Executor) -> None:
        self._gateway, self._recent, self._policy, self._maker = gateway, recent, policy, maker
        self._loop = asyncio.get_running_loop()
        self._began, self._began_at = self._loop.time(), time.time()
        self._samples: deque[TrafficSample] = deque(maxlen=_SAMPLES)
        self._totals: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW + 1)  # seconds, prompt and generated tokens
        self._gauges: dict[str, EngineGauges] = {}
        self._seen: object = None
        self._version = 0
        self._looked = float("-inf")
        self._made: tuple[int, str] = -1, ""  # version and HTML of the last rendered page
        self._making = asyncio.Lock()

    @property
    def version(self) -> int:
        self._looked = self._loop.time()
        return self._version

    async def newest(self) -> str:
        self._looked = self._loop.time()
        async with self._making:
            version, page = self._made
            if version != self._version:
                if version < 0:
                    await self.look()
                version = self._version
                page = await self._loop.run_in_executor(self._maker, router_page, self.view())
                page = alive(page, f"At {_clock(time.time())}.", version)
                self._made = version, page
            return page

    async def look(self) -> None:
        """Take a sample, and increase the version if the page would change."""
        self._sample()
        if self._loop.time() < self._looked + _WATCHED_SECONDS:
            engines = list(self._gateway.upstreams.all.values())
            told = await asyncio.gather(*(gauges_of(it, self._gateway.client) for it in engines))
            self._gauges = dict(zip((it.id for it in engines), told, strict=True))
        seen = self._state()
        if seen != self._seen:
            self._seen, self._version = seen, self._version + 1

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.look()

    def _state(self) -> object:
        """A value that changes whenever the page would change."""
        recent, last = self._recent, self._samples[-1]
        engines = tuple((it.id, it.healthy, it.problem, it.bucket) for it in self._gateway.upstreams.all.values())
        rates = last.prompt_rate, last.generated_rate, last.in_flight
        return engines, rates, recent.decided, recent.closings, recent.turns, recent.waiting, dict(self._gauges)

    def _sample(self) -> None:
        counts, seconds = self._gateway.counts, self._loop.time() - self._began
        self._totals.append((seconds, counts.prompt_tokens, counts.generated_tokens))
        before, prompts, generated = self._totals[0]
        over = max(seconds - before, 1e-9)
        in_flight = sum(it.in_flight for it in self._gateway.upstreams.all.values())
        self._samples.append(
            TrafficSample(
                seconds,
                (counts.prompt_tokens - prompts) / over,
                (counts.generated_tokens - generated) / over,
                in_flight,
                self._recent.waiting,
            )
        )

    def view(self) -> RouterView:
        """A copy of the gateway's current state for the page."""
        gateway, recent, counts = self._gateway, self._recent, self._gateway.counts
        decisions = (
            DecisionView(
                _clock(it.at),
                it.trajectory,
                it.context_tokens,
                it.placement.instance,
                it.placement.migrated,
                it.placement.reason,
            )
            for it in reversed(recent.decisions)
        )
        ended = (EndedLength(at - self._began_at, it.peak_context, it.finished) for at, it in recent.ended_trajectories)
        return RouterView(
            policy=self._policy,
            seconds=self._loop.time() - self._began,
            limits=gateway.upstreams.limits,
            engines=tuple(map(self._engine, gateway.upstreams.all.values())),
            sessions=tuple(map(self._session, gateway.trajectories.latest(_SESSIONS))),
            contexts=tuple(gateway.trajectories.contexts()),
            decisions=tuple(decisions),
            samples=tuple(self._samples),
            ended=tuple(ended),
            waiting=recent.waiting,
            turns=counts.turns,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            retries=counts.retries,
            migrations=counts.migrations,
        )

    def _engine(self, engine: Upstream) -> EngineView:
        gauges = self._gauges.get(engine.id, EngineGauges())
        return EngineView(
            engine.id,
            engine.bucket,
            engine.healthy,
            engine.problem,
            engine.in_flight,
            engine.load_tokens,
            engine.capacity_tokens,
            engine.turns,
            self._recent.generated.get(engine.id, 0),
            gauges.running,
            gauges.waiting,
            gauges.kv_share,
            engine.token_seconds,
        )

    def _session(self, live: LiveTrajectory) -> SessionView:
        engine = self._recent.engine_of(live.id)
        since = _clock(time.time() - (self._loop.time() - live.touched))
        where = f" on {engine}" if engine else ""
        if live.in_flight:
            state = f"turn{where} since {since}"
        elif live.turns:
            state = f"answered{where} at {since}"
        else:
            state = f"no answer to the turn{where} of {since}"
        return SessionView(live.id, live.task, engine, live.context, live.turns, state)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


@asynccontextmanager
async def router_page_at(
    port: int, token: str | None, gateway: Gateway, recent: Recent, policy: str
) -> AsyncIterator[str]:
    """Context that serves the page of a running gateway, and yields its address; port 0 means any free port. With a
    `token`, clients must send it; a browser asks its user for it as a password. Raises `OSError` if the port cannot be
    used."""
    with page_maker() as maker:
        page = RouterPage(gateway, recent, policy, maker)
        following = asyncio.create_task(page.follow())
        try:
            async with serving(live_application(page), "127.0.0.1", port, METRICS, token) as base:
                yield f"{base}/"
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
