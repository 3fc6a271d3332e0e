"""The error of step prices, learned from measured steps: one factor for each bottleneck, with its standard error.

Invariant: a bias depends only on the settled periods of one run. Without settled periods it corrects nothing, and its
error is the assumed error of prices in a new run.

A measured step is its price times a factor. The logarithms of the factors of the three bottlenecks are jointly normal.
They share a part due to the machine, and each has its own error. A settled period measures the factor of the bottleneck
with which the period was priced. By the correlation, the period also updates the other factors (a Kalman filter, West &
Harrison, Bayesian Forecasting and Dynamic Models, 1997, ch. 4). The size of surprises scales all errors (ibid., 4.5): a
run with accurate prices may act on small gains, and a run with erratic prices needs large gains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import get_args

from libra.plan.solution import Bottleneck, Prediction

Covariance = tuple[tuple[float, ...], ...]
BOTTLENECKS: tuple[Bottleneck, ...] = get_args(Bottleneck)
# Assumed standard deviations of the logarithm of a factor. `prediction_error` of a run is the measured error.
_SHARED = 0.15  # of the part that all prices of a run have in common
_OWN = 0.15  # of the part of each bottleneck
_KEPT = 0.97  # correlation of a factor's logarithm between successive periods; the rest returns to a fresh run
_UNTRIED = 0.05  # additional deviation for an allocation that did not run before
_FIRST_PERIODS, _MOST_PERIODS = 4.0, 20.0  # first and largest weight of the mean surprise, in periods
_STEP_SPREAD = 0.25  # assumed relative deviation of the seconds of steps
_SPREAD_STEPS = 4  # weight of this assumption, in measured steps


@dataclass(frozen=True, slots=True)
class PeriodSeconds:
    """The mean seconds of the steps of a settled period, and its standard error in seconds."""

    seconds: float
    error: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}; give measured seconds, above 0")
        if not 0 <= self.error < math.inf:
            raise ValueError(f"error is {self.error}; give a standard error in seconds, 0 or more")


def measured(steps: Sequence[float]) -> PeriodSeconds:
    """The mean seconds of a period's steps. The variance of few steps is not reliable, so it is pooled with an assumed
    variance. Raises ValueError without a step, or if the mean is not positive.
    """
    if not steps:
        raise ValueError("no step was measured; give the seconds of at least one")
    mean = fmean(steps)
    squares = math.fsum((step - mean) ** 2 for step in steps) + _SPREAD_STEPS * (_STEP_SPREAD * mean) ** 2
    return PeriodSeconds(mean, math.sqrt(squares / (_SPREAD_STEPS + len(steps) - 1) / len(steps)))


def measured_mean(seconds: float, steps: float) -> PeriodSeconds:
    """The mean seconds of `steps` steps whose individual seconds are unknown."""
    return PeriodSeconds(seconds, _STEP_SPREAD * seconds / math.sqrt(steps))


@dataclass(frozen=True, slots=True)
class PriceBias:
    """A normal distribution of the logarithm of measured over priced seconds, by bottleneck (in the order of
    `BOTTLENECKS`)."""

    means: tuple[float, ...]
    covariance: Covariance
    untried: float  # further standard deviation for an allocation that did not run before
    prior: Covariance  # covariance before any measurement
    surprise: float = 1.0  # mean of squared surprises, each divided by its variance; scales the covariance
    periods: float = _FIRST_PERIODS  # number of periods in this mean

    def factor(self, bottleneck: Bottleneck) -> float:
        """Ratio of the expected seconds of a step to its price."""
        return math.exp(self.means[BOTTLENECKS.index(bottleneck)])

    def error(self, bottleneck: Bottleneck) -> float:
        """Standard error of the logarithm of the factor, which is about the relative error of the factor."""
        index = BOTTLENECKS.index(bottleneck)
        return math.sqrt(self.surprise * self.covariance[index][index])

    def corrected(self, priced: Prediction) -> Prediction:
        """The corrected price: each of the three parts is multiplied by its factor, and the largest result is the step.
        A range of step seconds is scaled like the step.
        """
        seconds = {name: self.factor(name) * part for name, part in _parts(priced).items()}
        bottleneck = max(seconds, key=lambda name: seconds[name])
        step = seconds[bottleneck]
        scale = step / priced.step if priced.step > 0 else 1.0
        span = priced.step_range and (scale * priced.step_range[0], scale * priced.step_range[1])
        return Prediction(step, seconds["rollout"], seconds["training"], seconds["latency"], bottleneck, span)

    def learned(self, priced: Prediction, found: PeriodSeconds, *, untried: bool = False) -> PriceBias:
        """The bias for the next period, after a settled period with the price `priced` and the measured seconds
        `found`. `untried`: the period's allocation differs from that of the last settled period.
        """
        if priced.step <= 0:
            return self  # no factor makes this price equal the measurement
        bottleneck = self.corrected(priced).bottleneck
        index = BOTTLENECKS.index(bottleneck)
        more = self.untried**2 if untried else 0.0
        before = _each(self.covariance, lambda value, a, b: value + more * (a == b))
        noise = (found.error / found.seconds) ** 2
        column = [row[index] for row in before]
        variance = column[index] + noise
        gains = [each / variance if variance > 0 else 0.0 for each in column]
        surprise = math.log(found.seconds / _parts(priced)[bottleneck]) - self.means[index]
        periods = min(self.periods + 1, _MOST_PERIODS)
        square = surprise**2 / variance if variance > 0 else self.surprise
        known = _each(before, lambda value, a, b: value - gains[a] * column[b])
        return replace(
            self,
            means=tuple(_KEPT * (mean + gain * surprise) for mean, gain in zip(self.means, gains, strict=True)),
            surprise=self.surprise + (square - self.surprise) / periods,
            periods=periods,
            covariance=_each(known, lambda value, a, b: _KEPT**2 * value + (1 - _KEPT**2) * self.prior[a][b]),
        )

    def error_between(self, current: Mapping[Bottleneck, float], other: Mapping[Bottleneck, float]) -> float:
        """Standard error of the difference of two corrected steps, given as seconds by bottleneck; `other` is an
        allocation that did not run before. Common errors cancel.
        """
        apart = [current.get(name, 0.0) - other.get(name, 0.0) for name in BOTTLENECKS]
        pairs = itertools.product(range(len(apart)), repeat=2)
        variance = math.fsum(apart[a] * apart[b] * self.covariance[a][b] for a, b in pairs)
        variance = max(0.0, variance) + (self.untried * math.fsum(other.values())) ** 2
        return math.sqrt(self.surprise * variance)


def _each(covariance: Covariance, of: Callable[[float, int, int], float]) -> Covariance:
    return tuple(tuple(of(value, a, b) for b, value in enumerate(row)) for a, row in enumerate(covariance))


def _parts(prediction: Prediction) -> dict[Bottleneck, float]:
    return {"rollout": prediction.rollout, "training": prediction.training, "latency": prediction.latency}


_NONE = (0.0,) * len(BOTTLENECKS)
_EXACT: Covariance = (_NONE,) * len(BOTTLENECKS)
_FRESH: Covariance = tuple(tuple(_SHARED**2 + _OWN**2 * (a == b) for a in BOTTLENECKS) for b in BOTTLENECKS)
EXACT = PriceBias(_NONE, _EXACT, 0.0, _EXACT)  # for prices without error
FRESH = PriceBias(_NONE, _FRESH, _UNTRIED, _FRESH)  # for a run that has measured no period yet
