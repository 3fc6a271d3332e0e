"""The load that was proven to leave something to lend, and whether a load is inside it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of one serving engine."""

    rate: float  # requests that came in the last `window` seconds, a second
    queued: int  # prompt tokens of requests without a first token
    live: int  # requests that have not finished
    context: int  # tokens of their contexts


@dataclass(frozen=True, slots=True)
class Envelope:
    """The largest load, each part by itself, that a certificate was given for. Raises ValueError."""

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

    def breach(self, load: Load) -> str | None:
        """How the load leaves the envelope, in a few words; None where it is inside."""
        for name, shown in (
            ("rate", "requests/s"),
            ("queued", "queued tokens"),
            ("live", "requests"),
            ("context", "tokens"),
        ):
            value, most = getattr(load, name), getattr(self, name)
            if value > most:
                return f"{value:.4g} {shown}, certified to {most:.4g}"
        return None


class RateWindow:
    """Requests a second over the last `window` seconds. Times never fall."""

    def __init__(self, window: float) -> None:
        if not window > 0:
            raise ValueError(f"window is {window:g} s; it must be above 0")
        self.window = window
        self._times: deque[float] = deque()

    def arrive(self, now: float) -> None:
        self._times.append(now)

    def rate(self, now: float) -> float:
        while self._times and self._times[0] <= now - self.window:
            self._times.popleft()
        return len(self._times) / self.window
