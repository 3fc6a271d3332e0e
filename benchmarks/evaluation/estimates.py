"""Estimates of a number from a few seeds, with their 95 % intervals.

Invariant: one value has no interval; the same values give the same interval; one that the values cannot support is
refused, not guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the ends of its interval; `ends` is None where there is one seed."""

    value: float
    ends: tuple[float, float] | None = None

    def written(self, form: str) -> str:
        """Such as `3,024 (2,990 to 3,058)`."""
        said = f"{self.value:{form}}"
        return said if self.ends is None else f"{said} ({self.ends[0]:{form}} to {self.ends[1]:{form}})"


def mean(values: ArrayLike) -> Estimate:
    """The mean of independent values, by Student's t: exact for normal values. Raises ValueError for no value."""
    given = _values("values", values, 1)
    found = float(given.mean())
    if len(given) == 1:
        return Estimate(found)
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(given) - 1))
    half = quantile * float(given.std(ddof=1)) / math.sqrt(len(given))
    return Estimate(found, (found - half, found + half))


def ratio(numerators: ArrayLike, denominators: ArrayLike) -> Estimate:
    """The geometric mean of the ratios of paired runs, such as two policies on the same seeds.

    Student's t on the logarithms: exact for log-normal ratios. Raises ValueError for no pair, numbers that have no
    partner, and values of 0 or less.
    """
    above, below = _values("numerators", numerators, 1), _values("denominators", denominators, 1)
    if len(above) != len(below):
        raise ValueError(f"there are {len(above)} numerators and {len(below)} denominators; pairs need as many of each")
    if min(above.min(), below.min()) <= 0:
        raise ValueError("numerators or denominators has a value of 0 or less; a ratio's logarithm needs positive ones")
    if len(above) == 1:
        return Estimate(float(above[0] / below[0]))
    found = mean(np.log(above) - np.log(below))
    assert found.ends is not None
    return Estimate(math.exp(found.value), (math.exp(found.ends[0]), math.exp(found.ends[1])))


def _values(name: str, values: ArrayLike, least: int) -> Array:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 1 or len(given) < least:
        raise ValueError(f"{name} has shape {given.shape}; give a list of {least} or more")
    if not np.isfinite(given).all():
        raise ValueError(f"{name} has a value that is not finite; say what became of that run instead")
    return given
