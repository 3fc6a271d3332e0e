"""Simulated time that passes with real time.

Invariant: a tick of simulated time has one instant of the event loop's, and the other way round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libra.sim.clock import seconds, ticks

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
