"""A simulated engine that runs in real time.

Invariant: every event has the same tick as in a simulation with the same arrival times. A busy event loop delays the
report of an event, but not its tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

from libra.sim.clock import seconds, ticks
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.request import Chain, Request

_STREAM_SECONDS = 0.02  # between two pieces of a stream
_ROUNDING = 1e-9  # seconds; keeps a loop time, which is a float, from falling before its tick


class WallClock:
    """Simulated time that follows the event loop's clock; tick 0 is at construction. With a `speed` of 2, simulated
    time passes twice as fast.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, speed: float = 1.0) -> None:
        if not speed > 0:
            raise ValueError(f"speed is {speed}; give a number above 0")
        self._loop, self._speed, self._origin = loop, speed, loop.time()

    def now(self) -> int:
        return ticks((self._loop.time() - self._origin) * self._speed)

    def seconds(self, span: int) -> float:
        """Real seconds of `span` ticks."""
        return seconds(span) / self._speed

    def soon(self, call: Callable[[], None]) -> asyncio.Handle:
        """Schedule a call after all calls that are due already."""
        return self._loop.call_soon(call)

    def at(self, tick: int, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Schedule a call for the end of `tick`."""
        return self._loop.call_at(self._origin + seconds(tick) / self._speed + _ROUNDING, call)


class LiveEngine:
    """An emulated engine. Call `submit`, then await `finished` or iterate over `progress`. Call `cancel` if the client
    disconnects."""

    def __init__(self, spec: EngineSpec, clock: WallClock) -> None:
        self.spec = spec
        self.prompt_tokens = self.generated_tokens = 0  # of requests that have ended
        self._clock = clock
        self._engine = SimEngine(spec.config, spec.cost)
        self._numbers = count()
        self._ends: dict[Request, asyncio.Future[None]] = {}
        self._firsts: dict[Request, asyncio.Future[None]] = {}  # requests whose first token a caller awaits
        self._undecided: int | None = None  # tick at which the next iteration is to be planned
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
        """Fraction of KV blocks in use after the last scheduling step."""
        self._catch_up()
        return self._engine.pool.held / self._engine.pool.blocks

    def submit(self, chain: Chain, prompt_tokens: int, output_tokens: int, priority: int = 0) -> Request:
        """Submit a request that arrives now. Raises `ValueError` if the engine can never serve it."""
        now = self._catch_up()
        request = Request(next(self._numbers), now, prompt_tokens, output_tokens, chain=chain, priority=priority)
        self._engine.submit(request, now)
        if request.status == "refused":
            raise ValueError(request.reason)
        self._ends[request] = asyncio.get_running_loop().create_future()
        self._reschedule(now)
        return request

    async def finished(self, request: Request) -> None:
        """Wait for the last token. Raises `CancelledError` if the request is cancelled."""
        end = self._ends.get(request)
        if end is not None:
            await asyncio.shield(end)

    async def progress(self, request: Request) -> AsyncIterator[int]:
        """Yield the number of generated tokens: after the first token, then every `_STREAM_SECONDS` until the last.
        Raises `CancelledError` if the request is cancelled."""
        end = self._ends.get(request)
        if end is not None and request.first_token is None:
            first = self._firsts[request] = asyncio.get_running_loop().create_future()
            await asyncio.shield(first)  # cancelling the waiter must not cancel the future
        told = 0
        while True:
            generated = self._generated(request)
            if generated > told:
                yield (told := generated)
            if end is None or end.done():
                if end is not None:
                    end.result()
                return
            await asyncio.wait([end], timeout=_STREAM_SECONDS)

    def seconds(self, request: Request) -> float:
        """Real seconds from arrival to finish, by the simulator's clock."""
        assert request.finish is not None
        return self._clock.seconds(request.finish - request.arrival)

    def cancel(self, request: Request) -> None:
        """Cancel a request; no effect on a request that has ended."""
        now = self._catch_up()
        end = self._ends.pop(request, None)
        if end is None:
            return
        end.cancel()
        if (first := self._firsts.pop(request, None)) is not None:
            first.cancel()
        self._engine.cancel(request, now)
        self._reschedule(now)

    def close(self) -> None:
        """Stop the engine, and cancel all waiters."""
        self._wake_by(None)
        for waiter in (*self._ends.values(), *self._firsts.values()):
            waiter.cancel()
        self._ends.clear()
        self._firsts.clear()

    # Time

    def _catch_up(self) -> int:
        """Simulate everything up to now, and return the current tick. Does not schedule at this tick yet, since
        requests may still arrive at it.
        """
        now, engine = self._clock.now(), self._engine
        while True:
            if self._undecided is not None and self._undecided < now:
                self._plan()
            if not engine.busy or engine.end > now:
                return now
            self._undecided = engine.end
            for request in engine.commit():
                self._end(request)
            for request in [it for it in self._firsts if it.first_token is not None]:
                self._firsts.pop(request).set_result(None)

    def _reschedule(self, now: int) -> None:
        """Schedule after a request arrived or left at tick `now`, once all other requests of this tick have arrived."""
        if not self._engine.busy or self._engine.open:
            self._undecided = now
        self._wake_by(self._clock.soon(self._wake))

    def _wake(self) -> None:
        self._catch_up()
        self._plan()
        self._wake_by(self._clock.at(self._engine.end, self._wake) if self._engine.busy else None)

    def _wake_by(self, timer: asyncio.Handle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _plan(self) -> None:
        if self._undecided is not None:
            self._engine.plan(self._undecided)
        self._undecided = None

    # Waiters

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
