"""The turns in flight on a live engine: their load, and the pace learned from ended turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from libra.live.pace import Pace


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """A turn in flight on an engine."""

    tokens: int  # of its context
    began: float
    load_seconds: float  # integral of the engine's load over time, up to its beginning


@dataclass(frozen=True, slots=True)
class Took:
    """A turn's time on an engine, and the engine's mean load during this time."""

    seconds: float
    load_tokens: float


class LiveWork:
    """Counts turns that begin and end; answered turns give the pace. Times are seconds of `clock`."""

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.monotonic) -> None:
        self.pace = pace
        self._turns = 0
        self._clock = clock
        self._load_tokens = 0
        self._load_seconds, self._since = 0.0, clock()
        self._changed: Callable[[], object] = _nothing

    @property
    def load_tokens(self) -> int:
        """Context tokens of the turns in flight, including other clients' requests if known."""
        return self._load_tokens

    @load_tokens.setter
    def load_tokens(self, tokens: int) -> None:
        self._integrated()
        self._load_tokens = tokens
        self._changed()

    @property
    def token_seconds(self) -> float | None:
        """See `route.policy.Instance`: at the present load plus one turn of mean size."""
        load = self._load_tokens
        return self.pace.token_seconds(load + load / self._turns if self._turns else load)

    def watch(self, changed: Callable[[], object]) -> bool:
        """See `route.loads.WatchedInstance`."""
        self._changed = changed
        return True

    def begun(self, tokens: int) -> HeldTurn:
        """Begin a turn with this number of context tokens."""
        self._turns += 1
        self.load_tokens += tokens
        return HeldTurn(tokens, self._since, self._load_seconds)

    def ended(self, held: HeldTurn) -> Took:
        """End a turn. If it was answered, the caller must give the result to `pace`."""
        self._turns -= 1
        self.load_tokens -= held.tokens
        seconds = self._since - held.began
        return Took(seconds, (self._load_seconds - held.load_seconds) / seconds if seconds > 0 else 0.0)

    def _integrated(self) -> None:
        now = self._clock()
        self._load_seconds += self._load_tokens * (now - self._since)
        self._since = now


def _nothing() -> None:
    pass
