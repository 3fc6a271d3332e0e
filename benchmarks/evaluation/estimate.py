"""Estimates of a number from a few seeds.

Invariant: one seed gives a value and no interval; more give the interval of `intervals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.evaluation.intervals import Interval, mean_interval, ratio_interval


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    ends: tuple[float, float] | None  # of the 95 % interval; None: there is one seed

    def written(self, form: str) -> str:
        """Such as `3,024 (2,990 to 3,058)`."""
        said = f"{self.value:{form}}"
        return said if self.ends is None else f"{said} ({self.ends[0]:{form}} to {self.ends[1]:{form}})"


def mean(values: Sequence[float]) -> Estimate:
    """Estimate of the mean, by Student's t. Raises ValueError for no value."""
    if len(values) == 1:
        return Estimate(values[0], None)
    return _of(mean_interval(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The geometric mean of the ratios of pairs. Raises ValueError for no pair, lengths that differ, and values of 0
    or less."""
    if len(numerators) == len(denominators) == 1 and min(*numerators, *denominators) > 0:
        return Estimate(numerators[0] / denominators[0], None)
    return _of(ratio_interval(numerators, denominators))


def _of(interval: Interval) -> Estimate:
    return Estimate(interval.value, (interval.low, interval.high))
