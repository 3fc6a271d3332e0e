"""Pace of an engine: seconds per generated token, learned from its answered turns.

Invariant: a pace never decreases with the load. It is None until a turn of the engine, or of a similar engine, has
ended.
"""

from __future__ import annotations

from collections.abc import Sequence

_KEPT = 2 ** (-1 / 256)  # factor on the weight of older turns at each new turn: half after 256 turns
_LIKE_TOKENS = 2048.0  # weight of the turns of similar engines together, in generated tokens
_SPREAD = 0.3  # relative spread of loads at which the data weigh as much as the assumed slope
_GAP = 1.25  # ratio of paces that separates two classes of engines
_IDLE = 0.5  # assumed pace of an idle engine, relative to its pace at its mean load


class Pace:
    """Pace as a linear function of load: a least-squares line through an engine's turns, with its mean load during each
    turn.

    The weight of a turn is its number of generated tokens, and recent turns weigh more. If the loads hardly differ,
    they do not determine the slope. It then tends to the slope of an engine that is twice as fast when idle. Similar
    engines (`like`) provide the pace until the engine has its own turns.
    """

    __slots__ = ("_load", "_load_pace", "_load_squared", "_pace", "_tokens", "like")

    def __init__(self, like: Pace | None = None) -> None:
        self.like = like
        self._tokens = self._load = self._pace = self._load_squared = self._load_pace = 0.0

    def observe(self, generated_tokens: int, seconds: float, load_tokens: float) -> None:
        """Learn from a turn: its seconds, including wait and prompt, and the mean load of the other turns."""
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
        """Seconds per generated token of a turn at this load of other turns, including wait and prompt."""
        tokens, load, pace, load_squared, load_pace = self._sums()
        if tokens == 0:
            return None
        load, pace = load / tokens, pace / tokens
        if load < 1:  # the engine was idle in all turns
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
    """The class of each engine by its seconds per token, fastest class first. In rising order, a gap of factor `_GAP`
    begins a new class. Class 0 if the seconds are unknown.
    """
    classes, number, before = [0] * len(token_seconds), 0, 0.0
    for index in sorted(range(len(token_seconds)), key=token_seconds.__getitem__):
        number += 0 < before < token_seconds[index] / _GAP
        classes[index], before = number, token_seconds[index]
    return classes
