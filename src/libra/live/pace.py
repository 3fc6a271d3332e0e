"""Seconds that an engine takes for a generated token, learned from the turns that it has answered.

Invariant: a pace never falls as the load rises, and is None until a turn of the engine, or of one like it, has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

_KEPT = 2 ** (-1 / 256)  # share of the older turns' weight that remains after another one: half after 256
_LIKE_TOKENS = 2048.0  # generated tokens that count as much as all turns of similar engines
_SPREAD = 0.3  # relative spread of the loads at which they count as much as the assumption about their slope
_GAP = 1.25  # between two classes: how much slower the fastest engine of the next one is
_IDLE = 0.5  # assumed pace of an idle engine, relative to its pace at its mean load


class Pace:
    """A line through the paces of an engine's turns over its mean load in each, by least squares. A turn counts by its
    generated tokens, and recent turns count more.

    Where the loads hardly differ, they say little about the slope, which is then drawn towards that of an engine twice
    as fast when idle. Similar engines (`like`) stand in for the engine until it has turns of its own.
    """

    __slots__ = ("_load", "_load_pace", "_load_squared", "_pace", "_tokens", "like")

    def __init__(self, like: Pace | None = None) -> None:
        self.like = like
        self._tokens = self._load = self._pace = self._load_squared = self._load_pace = 0.0

    def observe(self, generated_tokens: int, seconds: float, load_tokens: float) -> None:
        """A turn took these seconds, its wait and its prompt included, beside this mean load."""
        if generated_tokens < 1 or seconds <= 0:
            return
        self._tokens = _KEPT * self._tokens + generated_tokens
        self._load = _KEPT * self._load + generated_tokens * load_tokens
        self._pace = _KEPT * self._pace + seconds
        self._load_squared = _KEPT * self._load_squared + generated_tokens * load_tokens * load_tokens
        self._load_pace = _KEPT * self._load_pace + seconds * load_tokens
        if self.like is not None:
            self.like.observe(generated_tokens, seconds, load_tokens)

    @property
    def load_tokens(self) -> float:
        """Mean load of the engine in its turns; 0 before the first."""
        return self._load / self._tokens if self._tokens else 0.0

    def token_seconds(self, load_tokens: float) -> float | None:
        """Seconds per generated token of a turn beside this load, its wait and its prompt included."""
        tokens, load, pace, load_squared, load_pace = self._sums()
        if tokens == 0:
            return None
        load, pace = load / tokens, pace / tokens
        if load < 1:  # token: it was idle in all turns
            return pace
        variance = max(0.0, load_squared / tokens - load * load)
        covariance = load_pace / tokens - load * pace
        steepest, assumed = pace / load, (_SPREAD * load) ** 2  # with the steepest slope, an idle engine takes no time
        slope = min(max(0.0, (covariance + assumed * (1 - _IDLE) * steepest) / (variance + assumed)), steepest)
        return max(0.0, pace - slope * load) + slope * load_tokens

    def _sums(self) -> tuple[float, float, float, float, float]:
        """Sums of weights, loads, paces, squared loads, and products of load and pace. Similar engines have the weight
        `_LIKE_TOKENS`."""
        own = self._tokens, self._load, self._pace, self._load_squared, self._load_pace
        if self.like is None:
            return own
        tokens, load, pace, load_squared, load_pace = self.like._sums()
        if tokens == 0:
            return own
        weight = _LIKE_TOKENS / tokens
        return (
            self._tokens + _LIKE_TOKENS,
            self._load + weight * load,
            self._pace + weight * pace,
            self._load_squared + weight * load_squared,
            self._load_pace + weight * load_pace,
        )


def pace_classes(token_seconds: Sequence[float]) -> list[int]:
    """The class of each engine by its seconds per token, the fastest first: where these, in rising order, leave a gap
    of `_GAP`, another class begins. 0 means that they are not known."""
    classes, number, before = [0] * len(token_seconds), 0, 0.0
    for index in sorted(range(len(token_seconds)), key=token_seconds.__getitem__):
        number += 0 < before < token_seconds[index] / _GAP
        classes[index], before = number, token_seconds[index]
    return classes
