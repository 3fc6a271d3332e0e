"""Intervals for a mean, a ratio or a median, from a few seeds.

Invariant: the same values give the same interval; one that the values cannot support is refused, not
guessed. `level` is the share of intervals that cover the truth, where the stated assumption holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2000  # of a bootstrap: Efron and Tibshirani 1993, sec. 13.3, ask for 1,000 or more of a percentile interval

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the ends of its interval."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.low} <= {self.value} <= {self.high} does not hold; an estimate is in its interval")


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """The mean of independent values, by Student's t: exact for normal values. Raises ValueError for less than 2."""
    given = _values("values", values, 2)
    mean = float(given.mean())
    half = t_quantile(len(given) - 1, level) * float(given.std(ddof=1)) / math.sqrt(len(given))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(numerators: ArrayLike, denominators: ArrayLike, level: float = LEVEL) -> Interval:
    """The geometric mean of the ratios of paired runs, such as two policies on the same seeds.

    Student's t on the logarithms: exact for log-normal ratios. Raises ValueError for less than 2 pairs, or for a value
    of 0 or less.
    """
    above, below = _pairs("numerators", numerators, "denominators", denominators, 2)
    if min(above.min(), below.min()) <= 0:
        raise ValueError("numerators or denominators has a value of 0 or less; a ratio's logarithm needs positive ones")
    found = mean_interval(np.log(above) - np.log(below), level)
    return Interval(*(math.exp(value) for value in (found.value, found.low, found.high)))


def median_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """The median of independent values of any distribution, by order statistics.

    Covers at least `level`: the k-th smallest and the k-th largest, for the largest k at which a binomial of half
    leaves out no more (David and Nagaraja 2003, sec. 7.1). Raises ValueError for too few values: 6 are needed at 95 %.
    """
    given = np.sort(_values("values", values, 1))
    rank = _median_rank(len(given), level)
    if rank == 0:
        needed = math.ceil(1 - math.log2(1 - level))
        raise ValueError(f"there are {len(given)} values; a {level:.0%} interval of a median takes {needed} or more")
    return Interval(float(np.median(given)), float(given[rank - 1]), float(given[-rank]))


def bootstrap_interval(
    statistic: Callable[..., float],
    *arrays: ArrayLike,
    seed: int,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Interval:
    """`statistic(*arrays)`, by the percentile bootstrap (Efron 1979): entries are drawn again with their partners, so
    that what belongs together stays together.

    Approximate: too narrow for few entries. An estimate beyond the percentiles, as of a statistic that is biased, is
    itself the end of the interval. Raises ValueError where arrays differ in length or have less than 2 entries.
    """
    if not arrays:
        raise ValueError("no array is given; give one or more, of the same length")
    _check_level(level)
    given = [_values(f"array {number}", array, 2) for number, array in enumerate(arrays)]
    size = len(given[0])
    if any(len(array) != size for array in given):
        raise ValueError(f"arrays have {[len(array) for array in given]} entries; give as many of each")
    if len({row.tobytes() for row in np.column_stack(given)}) == 1:  # nothing to draw; scipy would call it degenerate
        low = high = float(statistic(*given))
    else:
        found = stats.bootstrap(
            given,
            statistic,
            n_resamples=resamples,
            vectorized=False,
            paired=True,
            confidence_level=level,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
        low, high = found.confidence_interval
    value = float(statistic(*given))
    return Interval(value, min(float(low), value), max(float(high), value))


def t_quantile(degrees: int, level: float = LEVEL) -> float:
    """The t for which a share `level` of Student's distribution is within -t and t."""
    if degrees < 1:
        raise ValueError(f"degrees is {degrees}; give 1 or more")
    _check_level(level)
    return float(stats.t.ppf((1 + level) / 2, degrees))


def _median_rank(count: int, level: float) -> int:
    """The largest k for which the k-th smallest and the k-th largest leave out no more than 1 - level; 0 if none."""
    _check_level(level)
    allowed = (1 - level) / 2 * (1 + 1e-12)
    return int(np.searchsorted(stats.binom.cdf(np.arange(count // 2), count, 0.5), allowed, side="right"))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it is a share: more than 0, and less than 1")


def _values(name: str, values: ArrayLike, least: int) -> Array:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or len(given) < least:
        raise ValueError(f"{name} has shape {given.shape}; give a list of {least} or more")
    if not np.isfinite(given).all():
        raise ValueError(f"{name} has a value that is not finite; say what became of that run instead")
    return given


def _pairs(name: str, values: ArrayLike, other_name: str, others: ArrayLike, least: int) -> tuple[Array, Array]:
    given, paired = _values(name, values, least), _values(other_name, others, least)
    if len(given) != len(paired):
        raise ValueError(f"there are {len(given)} {name} and {len(paired)} {other_name}; pairs need as many of each")
    return given, paired
