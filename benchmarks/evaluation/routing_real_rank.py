"""Agreement of predictions with the quantity that they predict: by variance and by rank, of weighted samples.

Invariant: a sample of whole weight n counts as n samples that are alike.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def explained(truth: Array, squared_errors: Array, weights: Array) -> float:
    """R^2: 1 less the squared error as a share of the variance; below 0 where the mean would be the better prediction.

    Raises ValueError where the truth does not vary.
    """
    centred = truth - _sum(weights * truth) / _sum(weights)
    spread = _sum(weights * centred * centred)
    if not spread > 0:
        raise ValueError("what is predicted does not vary, so there is nothing to explain; give more trajectories")
    return 1 - _sum(weights * squared_errors) / spread


class Ranked:
    """Values whose weighted ranks are asked for again and again: they are sorted once."""

    __slots__ = ("_group", "_groups")

    def __init__(self, values: Array) -> None:
        distinct, self._group = np.unique(values, return_inverse=True)
        self._groups = len(distinct)

    def ranks(self, weights: Array) -> Array:
        """Weight below, and half of the weight that is equal: average ranks, up to a constant."""
        equal = np.bincount(self._group, weights, self._groups)
        ranks: Array = (equal.cumsum() - equal / 2)[self._group]
        return ranks


def rank_correlation(one: Ranked, other: Ranked, weights: Array) -> float:
    """Spearman's: Pearson's correlation of average ranks; 0 where either does not vary, and so orders nothing."""
    x, y = one.ranks(weights), other.ranks(weights)
    total = _sum(weights)
    x, y = x - _sum(weights * x) / total, y - _sum(weights * y) / total
    spread = _sum(weights * x * x) * _sum(weights * y * y)
    # Ranks are halves of whole numbers up to `total`: what is left of equal ones is rounding.
    return _sum(weights * x * y) / math.sqrt(spread) if spread > 1e-12 * total**4 else 0.0


def _sum(values: Array) -> float:
    """In an order that does not depend on how many threads there are, unlike that of a product of vectors."""
    return float(values.sum())
