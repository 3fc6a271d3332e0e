"""How many tokens, by a distribution.

Invariant: every length is a whole number from 1 to the distribution's limit, and one draw of lengths takes the same
numbers from the generator whatever the run's progress is.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LONGEST = 2**40  # tokens

Progress = NDArray[np.float64]
Tokens = NDArray[np.int64]


class Lengths(Protocol):
    def draw(self, progress: Progress, generator: np.random.Generator) -> Tokens:
        """One length for each entry of `progress`, the share of the run that came before it: 0 to 1."""
        ...

    def describe(self) -> dict[str, Any]:
        """The distribution and its parameters, as JSON values."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _check_tokens("tokens", self.tokens)

    def draw(self, progress: Progress, generator: np.random.Generator) -> Tokens:
        return np.full(len(progress), self.tokens, np.int64)

    def describe(self) -> dict[str, Any]:
        return described(self)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from `low` to `high`, both included, is as likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_tokens("low", self.low)
        _check_tokens("high", self.high)
        if self.high < self.low:
            raise ValueError(f"high is {self.high}, less than low {self.low}: exchange them")

    def draw(self, progress: Progress, generator: np.random.Generator) -> Tokens:
        return generator.integers(self.low, self.high, len(progress), endpoint=True)

    def describe(self) -> dict[str, Any]:
        return described(self)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(log `median`, `sigma`^2)), rounded; what is beyond `limit` is `limit`, as of a generation that was cut."""

    median: float
    sigma: float
    limit: int

    def __post_init__(self) -> None:
        _check_log_normal("median", self.median, self.sigma, self.limit)

    def draw(self, progress: Progress, generator: np.random.Generator) -> Tokens:
        return _cut(generator.lognormal(math.log(self.median), self.sigma, len(progress)), self.limit)

    def describe(self) -> dict[str, Any]:
        return described(self)


@dataclass(frozen=True, slots=True)
class DriftingLogNormal:
    """A lognormal whose median goes linearly from `first_median` to `last_median` over the run, cut at `limit`."""

    first_median: float
    last_median: float
    sigma: float
    limit: int

    def __post_init__(self) -> None:
        _check_log_normal("first_median", self.first_median, self.sigma, self.limit)
        _check_log_normal("last_median", self.last_median, self.sigma, self.limit)

    def draw(self, progress: Progress, generator: np.random.Generator) -> Tokens:
        medians = self.first_median + (self.last_median - self.first_median) * progress
        return _cut(medians * generator.lognormal(0.0, self.sigma, len(progress)), self.limit)

    def describe(self) -> dict[str, Any]:
        return described(self)


@dataclass(frozen=True, slots=True)
class LongTail:
    """A few very long: with probability `tail_share` a Pareto length, P(length > x) = (`tail_from` / x)^`tail_index`
    for x >= `tail_from`; otherwise a lognormal one. Both are cut at `limit`."""

    median: float
    sigma: float
    tail_share: float
    tail_from: float
    tail_index: float
    limit: int

    def __post_init__(self) -> None:
        _check_log_normal("median", self.median, self.sigma, self.limit)
        if not 0 <= self.tail_share <= 1:
            raise ValueError(f"tail_share is {self.tail_share}; it is a probability: 0 to 1")
        if not 1 <= self.tail_from <= self.limit:
            raise ValueError(f"tail_from is {self.tail_from}; set it to 1 or more, and no more than limit {self.limit}")
        if not 0 < self.tail_index < math.inf:
            raise ValueError(f"tail_index is {self.tail_index}; set it to more than 0 (1 to 2: a heavy tail)")

    def draw(self, progress: Progress, generator: np.random.Generator) -> Tokens:
        count = len(progress)
        in_tail = generator.random(count) < self.tail_share
        body = generator.lognormal(math.log(self.median), self.sigma, count)
        # A standard exponential e gives Pareto's tail_from * exp(e / tail_index); cut first, as exp may overflow.
        excess = np.minimum(generator.standard_exponential(count) / self.tail_index, math.log(_LONGEST))
        return _cut(np.where(in_tail, self.tail_from * np.exp(excess), body), self.limit)

    def describe(self) -> dict[str, Any]:
        return described(self)


def described(distribution: DataclassInstance) -> dict[str, Any]:
    """Its class's name and its fields, as JSON values."""
    return {"distribution": type(distribution).__name__, **asdict(distribution)}


def _cut(lengths: NDArray[np.float64], limit: int) -> Tokens:
    return np.rint(np.clip(lengths, 1, limit)).astype(np.int64)


def _check_tokens(field: str, tokens: int) -> None:
    if not 1 <= tokens <= _LONGEST:
        raise ValueError(f"{field} is {tokens} tokens; set it from 1 to {_LONGEST}")


def _check_log_normal(field: str, median: float, sigma: float, limit: int) -> None:
    _check_tokens("limit", limit)
    if not 1 <= median <= limit:
        raise ValueError(f"{field} is {median}; set it to 1 or more, and no more than limit {limit}")
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is {sigma}; set it to 0 or more, and finite")
