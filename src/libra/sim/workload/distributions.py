"""Distributions of lengths in tokens and of arrival times.

Invariant: every length is a whole number from 1 to the distribution's limit. Arrivals are whole ticks that never
decrease. The first `n` arrivals do not depend on the number of arrivals.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.sim.clock import LONGEST, TICKS

CHUNK = 16_384  # arrivals drawn at a time
_LONGEST = 2**40  # tokens

Tokens = NDArray[np.int64]
Ticks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Described:
    def describe(self) -> dict[str, Any]:
        """The distribution and its parameters, as JSON values."""
        return {"distribution": type(self).__name__, **asdict(self)}


class Lengths(_Described, ABC):
    __slots__ = ()

    @abstractmethod
    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        """`count` lengths in tokens."""


@dataclass(frozen=True, slots=True)
class Constant(Lengths):
    """Always `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _check_tokens("tokens", self.tokens)

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform(Lengths):
    """Every whole number from `low` to `high`, both included, with equal probability."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_tokens("low", self.low)
        _check_tokens("high", self.high)
        if self.high < self.low:
            raise ValueError(f"high is {self.high}, less than low {self.low}: exchange them")

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        return generator.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True, slots=True)
class LogNormal(Lengths):
    """exp(N(log `median`, `sigma`^2)), rounded. Lengths beyond `limit` become `limit`, like a cut generation."""

    median: float
    sigma: float
    limit: int

    def __post_init__(self) -> None:
        _check_log_normal(self.median, self.sigma, self.limit)

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        return _cut(generator.lognormal(math.log(self.median), self.sigma, count), self.limit)


@dataclass(frozen=True, slots=True)
class LongTail(Lengths):
    """Lengths with a heavy tail. With probability `tail_share` a length has a Pareto distribution, P(length > x) =
    (`tail_from` / x)^`tail_index` for x >= `tail_from`; otherwise a lognormal distribution. Lengths are cut at `limit`.
    """

    median: float
    sigma: float
    tail_share: float
    tail_from: float
    tail_index: float
    limit: int

    def __post_init__(self) -> None:
        _check_log_normal(self.median, self.sigma, self.limit)
        if not 0 <= self.tail_share <= 1:
            raise ValueError(f"tail_share is {self.tail_share}; give a probability, 0 to 1")
        if not 1 <= self.tail_from <= self.limit:
            raise ValueError(f"tail_from is {self.tail_from}; set it to 1 or more, and no more than limit {self.limit}")
        if not 0 < self.tail_index < math.inf:
            raise ValueError(f"tail_index is {self.tail_index}; set it to more than 0 (1 to 2: a heavy tail)")

    def draw(self, count: int, generator: np.random.Generator) -> Tokens:
        in_tail = generator.random(count) < self.tail_share
        body = generator.lognormal(math.log(self.median), self.sigma, count)
        # A standard exponential e gives Pareto's tail_from * exp(e / tail_index); cut first, as exp may overflow.
        excess = np.minimum(generator.standard_exponential(count) / self.tail_index, math.log(_LONGEST))
        return _cut(np.where(in_tail, self.tail_from * np.exp(excess), body), self.limit)


class Arrivals(_Described, ABC):
    __slots__ = ()

    @abstractmethod
    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        """Yield `count` times in ticks, in chunks of `CHUNK`; the last chunk may be shorter."""


@dataclass(frozen=True, slots=True)
class AtOnce(Arrivals):
    """Everything at tick 0: an offline batch."""

    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        for first in range(0, count, CHUNK):
            yield np.zeros(min(CHUNK, count - first), np.int64)


@dataclass(frozen=True, slots=True)
class Poisson(Arrivals):
    """A Poisson process: gaps are exponential with mean 1 / `rate` seconds. A gap precedes the first arrival, too."""

    rate: float  # per second

    def __post_init__(self) -> None:
        if not (0 < self.rate <= TICKS and math.isfinite(TICKS / self.rate)):
            raise ValueError(f"rate is {self.rate} per second; set it to more than 0, and no more than one per tick")

    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        now = 0
        for first in range(0, count, CHUNK):
            # Whole chunks are drawn, so that the first times do not depend on `count`.
            gaps = generator.exponential(TICKS / self.rate, CHUNK)[: count - first]
            if now + float(gaps.sum()) + len(gaps) >= LONGEST * TICKS:
                raise ValueError(
                    f"rate {self.rate} per second: the last arrival is more than 106 days away; ask for fewer requests"
                )
            times = now + np.cumsum(np.rint(gaps).astype(np.int64))
            now = int(times[-1])
            yield times


def _cut(lengths: NDArray[np.float64], limit: int) -> Tokens:
    return np.rint(np.clip(lengths, 1, limit)).astype(np.int64)


def _check_tokens(field: str, tokens: int) -> None:
    if not 1 <= tokens <= _LONGEST:
        raise ValueError(f"{field} is {tokens} tokens; set it from 1 to {_LONGEST}")


def _check_log_normal(median: float, sigma: float, limit: int) -> None:
    _check_tokens("limit", limit)
    if not 1 <= median <= limit:
        raise ValueError(f"median is {median}; set it to 1 or more, and no more than limit {limit}")
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is {sigma}; set it to 0 or more, and finite")
