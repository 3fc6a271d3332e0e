"""Measured samples to the coefficients of a `DeviceProfile`.

Invariant: no coefficient is negative, since no work takes negative time; the error that is reported belongs to samples
that the reported fit did not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LinearFit:
    """`seconds = coefficients . features`; `heldout_error` is the mean relative error when each sample is left out."""

    coefficients: tuple[float, ...]
    heldout_error: float


def fit_linear(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> LinearFit:
    """Non-negative least squares on relative errors. `features` is [samples, k]; needs more samples than k."""
    rows, times = np.asarray(features, dtype=float), np.asarray(seconds, dtype=float)
    if rows.ndim != 2 or len(rows) != len(times) or len(rows) <= rows.shape[1]:
        raise ValueError(f"{len(rows)} samples cannot determine {rows.shape[-1]} coefficients: measure more points")
    if (times <= 0).any():
        raise ValueError("a measured time is not positive: measure again")
    errors = []
    for left_out in range(len(times)):
        keep = np.arange(len(times)) != left_out
        predicted = rows[left_out] @ _non_negative(rows[keep], times[keep])
        errors.append(abs(predicted - times[left_out]) / times[left_out])
    return LinearFit(tuple(float(value) for value in _non_negative(rows, times)), float(np.mean(errors)))


def _non_negative(rows: Rows, times: Rows) -> Rows:
    """Lawson and Hanson's active set (Solving Least Squares Problems, 1974, ch. 23) on rows scaled by 1 / time."""
    scaled, ones = rows / times[:, None], np.ones(len(times))
    lengths = np.linalg.norm(scaled, axis=0)
    lengths[lengths == 0] = 1.0
    scaled = scaled / lengths  # columns of unit length: the tolerances below mean the same for every feature
    width = rows.shape[1]
    solution, free = np.zeros(width), np.zeros(width, dtype=bool)
    while True:
        gradient = scaled.T @ (ones - scaled @ solution)
        gradient[free] = -np.inf
        entering = int(np.argmax(gradient))
        if free.all() or gradient[entering] <= 1e-10 * len(times):
            fitted: Rows = solution / lengths
            return fitted
        free[entering] = True
        while True:
            trial = np.zeros(width)
            trial[free] = np.linalg.lstsq(scaled[:, free], ones, rcond=None)[0]
            if (trial[free] > 0).all():
                solution = trial
                break
            blocked = free & (trial <= 0)
            step = np.min(solution[blocked] / (solution[blocked] - trial[blocked]))
            solution = solution + step * (trial - solution)
            free &= solution > 1e-15
            solution[~free] = 0.0
