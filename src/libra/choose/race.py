"""Which of several contenders is fastest, found in as few samples as may be.

Invariant: contenders are compared on the samples that they have in common, in order: sample k of each was made under
the same circumstances (common random numbers), so differences are paired.

Sequential halving (Karnin, Koren and Somekh, ICML 2013, "Almost optimal exploration in multi-armed bandits"): rounds of
equal cost, after each of which the slower half drops out. It needs no variances, and no sample is wasted on those that
are far behind. Contender 0 is the control and stays to the end. The race ends early where the fastest is separated from
all others, or where time is up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from libra.choose.intervals import mean_and_error

_LEAST_PAIRS = 3  # differences from which a separation is believed


class Sampler(Protocol):
    """Makes samples: seconds, in their order."""

    def upto(self, wanted: Mapping[int, int]) -> Generator[tuple[int, tuple[float, ...]], None, None]:
        """The first `wanted` samples of each contender, as soon as they are there."""


@dataclass(frozen=True, slots=True)
class Standings:
    """The samples of each contender; none of those that there was no time for."""

    samples: tuple[tuple[float, ...], ...]
    finalists: tuple[int, ...]  # those that are left, the fastest first

    def slower(self, contender: int, than: int) -> tuple[float, float | None]:
        """Mean difference over common samples, and half of its 95 % interval (None: a single sample)."""
        return _difference(self.samples[contender], self.samples[than])

    @property
    def equals(self) -> tuple[int, ...]:
        """The fastest of those that are left, and the others that the samples do not separate from it."""
        fastest, *others = self.finalists
        return (fastest, *(it for it in others if not _separated(self.samples[fastest], self.samples[it])))


def race(
    sampler: Sampler, contenders: int, *, first: int = 1, time_left: Callable[[], bool] = lambda: True
) -> Standings:
    """Race contenders 0, 1, ... The first round takes `first` samples of each. `time_left` says after each answer
    whether there is any; the first two contenders are sampled in any case."""
    samples: list[tuple[float, ...]] = [()] * contenders
    alive = list(range(contenders))
    wanted, more = 0, first
    for _ in range(max(1, math.ceil(math.log2(contenders)))):
        wanted += more
        if not _sampled(sampler, alive, wanted, samples, time_left):
            alive = [it for it in alive if samples[it]]
            break
        alive.sort(key=lambda it: fmean(samples[it][:wanted]))
        fastest, *others = alive
        if all(_separated(samples[fastest], samples[it]) for it in others):
            break
        half = (len(alive) + 1) // 2
        kept = alive[:half] if 0 in alive[:half] else [*alive[: max(1, half - 1)], 0]
        more = math.ceil(more * len(alive) / len(kept))
        alive = kept
    common = min(len(samples[it]) for it in alive)
    alive.sort(key=lambda it: fmean(samples[it][:common]))
    return Standings(tuple(samples), tuple(alive))


def _sampled(
    sampler: Sampler, alive: list[int], wanted: int, samples: list[tuple[float, ...]], time_left: Callable[[], bool]
) -> bool:
    """Take the samples of a round; False where time was up before its end."""
    left = set(alive)
    with closing(sampler.upto(dict.fromkeys(alive, wanted))) as answers:
        for contender, found in answers:
            samples[contender] = found
            left.discard(contender)
            if left and not time_left() and all(samples[it] for it in (0, 1)):
                return False
    return True


def _difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, float | None]:
    return mean_and_error([a - b for a, b in zip(one, other, strict=False)])


def _separated(fast: Sequence[float], slow: Sequence[float]) -> bool:
    """Whether the interval of the paired difference is above 0; a few pairs never say so."""
    mean, error = _difference(slow, fast)
    return error is not None and min(len(fast), len(slow)) >= _LEAST_PAIRS and mean > error
