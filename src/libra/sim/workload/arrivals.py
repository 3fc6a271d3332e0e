"""When things arrive, by a distribution.

Invariant: times are whole ticks that never fall, and the first `n` of them do not depend on how many are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from libra.sim.clock import TICKS, ticks
from libra.sim.workload.distribution import described

CHUNK = 16_384  # drawn at a time
_LATEST = 2**63 - 1  # ticks, about 106 days: an int64 holds no more

Ticks = NDArray[np.int64]


class Arrivals(Protocol):
    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        """`count` times in ticks, in chunks of `CHUNK`, of which the last may be shorter."""
        ...

    def describe(self) -> dict[str, Any]:
        """The distribution and its parameters, as JSON values."""
        ...


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Everything at tick 0: an offline batch."""

    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        for size in _sizes(count):
            yield np.zeros(size, np.int64)

    def describe(self) -> dict[str, Any]:
        return described(self)


@dataclass(frozen=True, slots=True)
class Steady:
    """Deterministic: one every 1 / `rate` seconds (rounded to a tick), the first at tick 0."""

    rate: float  # per second

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        gap = ticks(1 / self.rate)
        if (count - 1) * gap > _LATEST:
            raise _too_late(self.rate)
        done = 0
        for size in _sizes(count):
            yield np.arange(done, done + size, dtype=np.int64) * gap
            done += size

    def describe(self) -> dict[str, Any]:
        return described(self)


@dataclass(frozen=True, slots=True)
class Poisson:
    """A Poisson process: gaps are exponential with mean 1 / `rate` seconds, the first one before the first arrival."""

    rate: float  # per second

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        now = 0
        for size in _sizes(count):
            gaps = generator.exponential(TICKS / self.rate, CHUNK)[:size]
            if now + float(gaps.sum()) + size > _LATEST:
                raise _too_late(self.rate)
            times = now + np.cumsum(np.rint(gaps).astype(np.int64))
            now = int(times[-1])
            yield times

    def describe(self) -> dict[str, Any]:
        return described(self)


@dataclass(frozen=True, slots=True)
class Bursts:
    """An on/off process of fixed periods: for `on_seconds` a Poisson process of `rate`, for `off_seconds` nothing, and
    so on. The mean rate is `rate * on_seconds / (on_seconds + off_seconds)`."""

    rate: float  # per second, while on
    on_seconds: float
    off_seconds: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if ticks(self.on_seconds) == 0:
            raise ValueError(f"on_seconds is {self.on_seconds}; set it to more than 0")
        ticks(self.off_seconds)

    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        on, off = ticks(self.on_seconds), ticks(self.off_seconds)
        for times in Poisson(self.rate).chunks(count, generator):
            if int(times[-1]) + int(times[-1]) // on * off > _LATEST:
                raise _too_late(self.rate)
            # min: periods longer than all of time need not fit into an int64.
            yield times + times // min(on, _LATEST) * min(off, _LATEST)

    def describe(self) -> dict[str, Any]:
        return described(self)


@dataclass(frozen=True, slots=True)
class AtTimes:
    """Given times, for as many arrivals as there are."""

    times: tuple[int, ...]  # ticks

    def __post_init__(self) -> None:
        if list(self.times) != sorted(self.times) or (
            self.times and not 0 <= self.times[0] <= self.times[-1] <= _LATEST
        ):
            raise ValueError(f"times must be ticks from 0 to {_LATEST} that never fall: sort them")

    def chunks(self, count: int, generator: np.random.Generator) -> Iterator[Ticks]:
        if count != len(self.times):
            raise ValueError(f"{len(self.times)} times are given for {count} arrivals: give one for each")
        for first in range(0, count, CHUNK):
            yield np.array(self.times[first : first + CHUNK], np.int64)

    def describe(self) -> dict[str, Any]:
        return {"distribution": "AtTimes", "times": list(self.times)}


def _sizes(count: int) -> Iterator[int]:
    for first in range(0, count, CHUNK):
        yield min(CHUNK, count - first)


def _check_rate(rate: float) -> None:
    if not (math.isfinite(rate) and 0 < rate <= TICKS and math.isfinite(TICKS / rate)):
        raise ValueError(f"rate is {rate} per second; set it to more than 0, and no more than one per tick")


def _too_late(rate: float) -> ValueError:
    return ValueError(f"rate {rate} per second: the last arrival is more than 106 days away; ask for fewer, or faster")
