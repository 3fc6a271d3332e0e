"""Intervals of the means of few values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom; above 30, the normal distribution's value.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.960


def student(freedom: int) -> float:
    """Student's t of a two-sided 95 % interval for the given degrees of freedom, 1 or more."""
    return _T[freedom - 1] if freedom <= len(_T) else _NORMAL


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of one or more values, and half of its 95 % interval by Student's t; the half is None for one value."""
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
