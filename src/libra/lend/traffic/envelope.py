"""The envelope of loads that are certified for lending, and the check whether a load is inside it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one serving engine."""

    rate: float  # requests per second, over the last `window` seconds
    queued: int  # prompt tokens of requests without a first token
    live: int  # requests that have not finished
    context: int  # tokens of the contexts of live requests


@dataclass(frozen=True, slots=True)
class Envelope:
    """The largest load that a certificate covers, part by part. Raises ValueError."""

    rate: float
    queued: int
    live: int
    context: int
    window: float  # seconds over which the rate is counted

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} of an envelope is {value:g}; it must be above 0")

    def used(self, load: Load) -> float:
        """The largest ratio of a part of the load to the envelope's limit; above 1 the load is outside."""
        parts = load.rate / self.rate, load.queued / self.queued, load.live / self.live, load.context / self.context
        return max(parts)

    def breach(self, load: Load) -> str | None:
        """The part of the load that is outside the envelope, in a few words; None: the load is inside."""
        for name, shown in (
            ("rate", "requests/s"),
            ("queued", "queued tokens"),
            ("live", "requests"),
            ("context", "tokens"),
        ):
            value, most = getattr(load, name), getattr(self, name)
            if value > most:
                return f"{value:.4g} {shown}, lent up to {most:.4g}"
        return None


class RateWindow:
    """Requests per second over the last `window` seconds, from the total count. Requests before the first call do not
    count. Times must not fall. A lower count means that the engine was restarted, and begins a new window. If more than
    a window has passed since the last call, requests are assumed to have arrived evenly since then."""

    def __init__(self, window: float) -> None:
        if not window > 0:
            raise ValueError(f"window is {window:g} s; it must be above 0")
        self.window = window
        self._seen: deque[tuple[float, int]] = deque()  # (time, requests that had come by then)
        self._before: float | None = None  # requests that had come before the window; None: no call yet
        self._looked = -math.inf  # time of the latest call

    def rate(self, now: float, came: int) -> float:
        seen = self._seen
        if self._before is None:
            self._before = came
        if seen and came < seen[-1][1]:
            seen.clear()
            self._before = 0
        if seen and now - self._looked > self.window:
            self._before = came - (came - seen[-1][1]) * self.window / (now - self._looked)
            seen.clear()
        self._looked = now
        if not seen or seen[-1][1] != came:
            seen.append((now, came))
        while seen[0][0] <= now - self.window and seen[0][1] != came:
            self._before = seen.popleft()[1]
        if seen[0][0] <= now - self.window:
            self._before = came
        return (came - self._before) / self.window
