"""Finds the fastest of several contenders with few samples.

Invariant: contenders are compared on their common samples, in order. Sample k of all contenders has the same conditions
(common random numbers), so differences are paired.

The method is sequential halving (Karnin, Koren and Somekh, ICML 2013, "Almost optimal exploration in multi-armed
bandits"): rounds of equal cost, after each of which the slower half drops out. Contender 0 is the control and stays to
the end. When only the control and one other contender remain, both are sampled until they are separated. Ranks use
posterior differences (`Gap`), so that a few noisy samples do not outweigh the expectation (Chick and Inoue, Operations
Research 2001, "New two-stage and sequential procedures for selecting the best simulated system").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import Protocol

from libra.choose.intervals import mean_and_error, student

MOST_SAMPLES = 12  # of a contender
_ALIKE = 0.01  # share of the control's seconds; contenders that differ by less count as equal
# Assumed standard deviation of a paired difference, relative to the control's seconds. It weighs like an estimate with
# `_NOISE_FREEDOM` degrees of freedom, since the first few differences are often nearly equal by chance (Smyth 2004,
# "Linear models and empirical Bayes methods": moderated variances).
_NOISE, _NOISE_FREEDOM = 0.06, 2


class Sampler(Protocol):
    """Source of samples, in seconds, in a fixed order."""

    def upto(self, wanted: Mapping[int, int]) -> Generator[tuple[int, tuple[float, ...]], None, None]:
        """Yield each contender with its first `wanted` samples, as soon as these exist."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected seconds of a contender, and their standard error relative to the control's seconds: 0 for the control,
    above 0 for all others. Errors of different contenders are independent.
    """

    seconds: float
    error: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds by which one contender is slower than another, from expectation and samples, and half of the 95 %
    interval.
    """

    seconds: float
    error: float

    @property
    def separates(self) -> bool:
        return abs(self.seconds) > self.error


@dataclass(frozen=True, slots=True)
class Standings:
    """Samples of each contender; a contender may have no samples if time ran out."""

    expected: tuple[Expected, ...]
    samples: tuple[tuple[float, ...], ...]
    finalists: tuple[int, ...]  # remaining contenders, the fastest first
    cut_short: bool = False  # whether time ran out before the race was decided

    def slower(self, contender: int, than: int) -> tuple[float, float | None]:
        """Mean difference over common samples, and half of its 95 % interval (None for a single sample)."""
        return mean_and_error(self._differences(contender, than))

    def gap(self, contender: int, than: int) -> Gap:
        """The difference by samples and by expectation: two normal distributions, weighed by their precisions."""
        if contender == than:
            return Gap(0.0, 0.0)
        prior = self.expected[contender].seconds - self.expected[than].seconds
        scale = self.expected[0].seconds
        doubt = scale * math.hypot(self.expected[contender].error, self.expected[than].error)
        differences = self._differences(contender, than)
        if not differences:
            return Gap(prior, student(_NOISE_FREEDOM) * doubt)
        own = len(differences) - 1
        squares = _NOISE_FREEDOM * (_NOISE * scale) ** 2 + (own * variance(differences) if own else 0.0)
        freedom = _NOISE_FREEDOM + own
        noise = squares / freedom / len(differences)
        precision = 1 / doubt**2 + 1 / noise
        mean = (prior / doubt**2 + fmean(differences) / noise) / precision
        return Gap(mean, student(freedom) / math.sqrt(precision))

    def with_samples(self, more: Mapping[int, tuple[float, ...]]) -> Standings:
        """These standings with other samples of some contenders."""
        return replace(self, samples=tuple(more.get(k, its) for k, its in enumerate(self.samples)))

    @property
    def equals(self) -> tuple[int, ...]:
        """The fastest finalist, and finalists that are slower by less than a hundredth of the control's expected
        seconds.
        """
        fastest, *others = self.finalists
        return (fastest, *(it for it in others if self.gap(it, fastest).seconds < self._enough))

    @property
    def decided(self) -> bool:
        """Whether each finalist is clearly slower than the fastest, or certainly equal to it."""
        fastest, *others = self.finalists
        gaps = [self.gap(it, fastest) for it in others]
        return all(it.separates or abs(it.seconds) + it.error < self._enough for it in gaps)

    @property
    def _enough(self) -> float:
        return _ALIKE * self.expected[0].seconds

    def _differences(self, contender: int, than: int) -> list[float]:
        return [a - b for a, b in zip(self.samples[contender], self.samples[than], strict=False)]


def race(
    sampler: Sampler,
    expected: Sequence[Expected],
    *,
    first: int = 1,
    most: int = MOST_SAMPLES,
    time_left: Callable[[], bool] = lambda: True,
) -> Standings:
    """Race contenders 0, 1, ... The first round takes `first` samples of each, and no contender gets more than `most`.
    `time_left` is called after each answer; the first two contenders are always sampled."""
    samples: list[tuple[float, ...]] = [()] * len(expected)
    alive = list(range(len(expected)))
    wanted, more, cut_short = 0, first, False

    def ranked() -> Standings:
        standings = Standings(tuple(expected), tuple(samples), tuple(alive), cut_short)
        return replace(standings, finalists=tuple(sorted(alive, key=lambda it: standings.gap(it, 0).seconds)))

    while wanted < most:
        wanted = min(wanted + more, most)
        if not _sampled(sampler, alive, wanted, samples, time_left):
            alive, cut_short = [it for it in alive if samples[it]], True
            break
        standings = ranked()
        if standings.decided:
            break
        if wanted < most and not time_left():
            cut_short = True
            break
        kept = _faster_half(standings.finalists)
        more = math.ceil(more * len(alive) / len(kept))
        alive = list(kept)
    return ranked()


def _faster_half(ranked: Sequence[int]) -> Sequence[int]:
    """The control and the fastest other contenders: half of all, and at least two."""
    half = max(min(2, len(ranked)), (len(ranked) + 1) // 2)
    return ranked[:half] if 0 in ranked[:half] else (*ranked[: half - 1], 0)


def _sampled(
    sampler: Sampler, alive: list[int], wanted: int, samples: list[tuple[float, ...]], time_left: Callable[[], bool]
) -> bool:
    """Take the samples of a round; False if time ran out before its end."""
    left = set(alive)
    with closing(sampler.upto(dict.fromkeys(alive, wanted))) as answers:
        for contender, found in answers:
            samples[contender] = found
            left.discard(contender)
            if left and not time_left() and all(samples[it] for it in (0, 1)):
                return False
    return True
