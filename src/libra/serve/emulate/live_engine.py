"""A simulated engine that runs while time passes.

Invariant: what happens, and at which tick, is what the simulator says of requests that arrive when these did. A busy
event loop tells of it later; it makes nothing happen later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

from libra.sim.clock import seconds, ticks
from libra.sim.engine.chain import Chain
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import Engine
from libra.sim.engine.request import Request

_LOOK = 0.02  # seconds between two looks at a request whose tokens are streamed
_ROUNDING = 1e-9  # seconds: an event loop's time is a float, and must not be before the tick


class WallClock:
    """Starts at tick 0 when it is made. With a `speed` of 2 simulated time passes twice as fast as real time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, speed: float = 1.0) -> None:
        if not speed > 0:
            raise ValueError(f"speed is {speed}; give a number above 0")
        self._loop, self._speed, self._origin = loop, speed, loop.time()

    def now(self) -> int:
        return ticks((self._loop.time() - self._origin) * self._speed)

    def seconds(self, span: int) -> float:
        """Real seconds in which so many ticks pass."""
        return seconds(span) / self._speed

    def soon(self, call: Callable[[], None]) -> asyncio.Handle:
        """Call after all that is due already."""
        return self._loop.call_soon(call)

    def at(self, tick: int, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call once this tick is over."""
        return self._loop.call_at(self._origin + seconds(tick) / self._speed + _ROUNDING, call)


class RefusedError(ValueError):
    """No engine of this kind can serve the request. The message says why."""


class LiveEngine:
    """`request = submit(...)`, then `await finished(request)`, or iterate over `progress(request)`; `cancel(request)`
    when nobody waits for it any more."""

    def __init__(self, spec: EngineSpec, clock: WallClock) -> None:
        self.spec = spec
        self.prompt_tokens = self.generated_tokens = 0  # of requests that have ended
        self._clock = clock
        self._engine = Engine(spec.config, spec.cost)
        self._numbers = count()
        self._ends: dict[Request, asyncio.Future[None]] = {}
        self._firsts: dict[Request, asyncio.Future[None]] = {}  # of those whose first token somebody waits for
        self._undecided: int | None = None  # tick at which something is to be planned
        self._timer: asyncio.Handle | None = None

    @property
    def running(self) -> int:
        self._catch_up()
        return len(self._engine.running)

    @property
    def waiting(self) -> int:
        self._catch_up()
        return len(self._engine.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the cache's blocks that requests hold, as of the last decision."""
        self._catch_up()
        return self._engine.pool.held / self._engine.pool.blocks

    def submit(self, chain: Chain, prompt_tokens: int, output_tokens: int, priority: int = 0) -> Request:
        """Raises `RefusedError`."""
        now = self._catch_up()
        request = Request(next(self._numbers), now, prompt_tokens, output_tokens, chain=chain, priority=priority)
        self._engine.submit(request, now)
        if request.status == "refused":
            raise RefusedError(request.reason)
        self._ends[request] = asyncio.get_running_loop().create_future()
        self._heard(now)
        return request

    async def finished(self, request: Request) -> None:
        """Wait for the last token. Raises CancelledError where it is cancelled meanwhile."""
        end = self._ends.get(request)
        if end is not None:
            await asyncio.shield(end)

    async def progress(self, request: Request) -> AsyncIterator[int]:
        """Tokens generated so far, each time that there are more, until all are there: the first at once, the others as
        often as somebody who reads would notice. Raises CancelledError where it is cancelled meanwhile."""
        end = self._ends.get(request)
        if end is not None and request.first_token is None:
            first = self._firsts[request] = asyncio.get_running_loop().create_future()
            await asyncio.shield(first)  # it is not the waiter's to cancel
        told = 0
        while True:
            generated = self._generated(request)
            if generated > told:
                yield (told := generated)
            if end is None or end.done():
                if end is not None:
                    end.result()
                return
            await asyncio.wait([end], timeout=_LOOK)

    def seconds(self, request: Request) -> float:
        """Real ones from the arrival to the end of one that has finished, as the simulator has them."""
        assert request.finish is not None
        return self._clock.seconds(request.finish - request.arrival)

    def cancel(self, request: Request) -> None:
        """One that has ended stays as it is."""
        now = self._catch_up()
        end = self._ends.pop(request, None)
        if end is None:
            return
        end.cancel()
        if (first := self._firsts.pop(request, None)) is not None:
            first.cancel()
        self._engine.cancel(request, now)
        self._heard(now)

    def close(self) -> None:
        """No more happens, and who waits is told."""
        self._wake_by(None)
        for waiter in (*self._ends.values(), *self._firsts.values()):
            waiter.cancel()

    # Time

    def _catch_up(self) -> int:
        """Make happen what has happened before now, and return the tick of now. What follows at this very tick is not
        decided: others may come at it."""
        now, engine = self._clock.now(), self._engine
        while True:
            if self._undecided is not None and self._undecided < now:
                self._plan(self._undecided)
            if not engine.busy or engine.end > now:
                return now
            self._undecided = engine.end
            for request in engine.commit():
                self._end(request)
            for request in [it for it in self._firsts if it.first_token is not None]:
                self._firsts.pop(request).set_result(None)

    def _heard(self, now: int) -> None:
        """Somebody came, or went, at this tick: decide, once all who do at the same time have been heard."""
        if not self._engine.busy or self._engine.open:
            self._undecided = now
        self._wake_by(self._clock.soon(self._wake))

    def _wake(self) -> None:
        self._catch_up()
        if self._undecided is not None:
            self._plan(self._undecided)
        self._wake_by(self._clock.at(self._engine.end, self._wake) if self._engine.busy else None)

    def _wake_by(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _plan(self, tick: int) -> None:
        self._engine.plan(tick)
        self._undecided = None

    # Those who wait

    def _end(self, request: Request) -> None:
        self.prompt_tokens += request.prompt_tokens
        self.generated_tokens += request.generated
        end = self._ends.pop(request, None)
        if end is not None and not end.done():
            end.set_result(None)

    def _generated(self, request: Request) -> int:
        now = self._catch_up()
        if request.status in ("waiting", "running"):
            return self._engine.generated_by(request, now)
        return request.generated
