"""Remaining tokens of a trajectory, as a distribution over bins that widen with the length.

Invariant: mean, quantiles and probabilities follow from one set of shares of the lengths that are still possible. Each
share is spread evenly over its bin.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Self

import numpy as np
from numpy.typing import NDArray

Histogram = NDArray[np.float32]  # weights by bin; single precision, since there are many histograms

# Edges at 16 * (2 ** (i / 4) - 1) tokens. The first bins have 3 tokens; above a few hundred tokens, the width of a bin
# is about a fifth of the length. The last edge is at 16.8 million tokens.
BINS = 80
BINS_PER_OCTAVE = 4
EDGES: tuple[float, ...] = tuple(16.0 * (2 ** (edge / BINS_PER_OCTAVE) - 1) for edge in range(BINS + 1))

_INNER_EDGES = EDGES[1:-1]

_SERIES = 1e-3  # below this value, two terms of the power series are exact in floating point
_NEGLIGIBLE = 1e-5  # smaller shares are no evidence for longer lengths: single-precision sums have errors of 1e-6


def bin_of(tokens: int) -> int:
    """The bin of a number of tokens, 0 or more. Numbers beyond the last edge are in the last bin."""
    return bisect_right(_INNER_EDGES, tokens)


def _at_edges() -> Histogram:
    """Two linear maps from weights by bin to values at each edge: the weight at or beyond the edge, and the weighted
    tokens before the edge.
    """
    reach = np.tri(BINS, BINS + 1)
    before = np.zeros((BINS, BINS + 1))
    before[:, 1:] = ((reach[:, :-1] + reach[:, 1:]) / 2 * np.diff(EDGES)).cumsum(axis=1)
    return np.hstack([reach, before]).astype(np.float32)


_AT_EDGES = _at_edges()
_BEFORE = BINS + 1  # index at which the second map begins


class Remaining:
    """Distribution of the tokens that a trajectory still generates, or receives from tools, until its end. Immutable.

    `weights` has a weight for each bin, 0 or more. Raises ValueError if their sum is 0.
    """

    __slots__ = ("_at", "_past", "_past_before", "_past_reach", "_weights", "mean")

    def __init__(self, weights: Histogram) -> None:
        self._weights = weights
        self._at = weights.dot(_AT_EDGES)  # not `@`, whose overhead exceeds the multiplication
        self._past = 0.0  # tokens that the trajectory has exceeded already
        self._past_before = 0.0
        self._past_reach = self._at.item(0)
        if not self._past_reach > 0:
            raise ValueError(f"the weights sum to {self._past_reach}: a distribution needs a sum above 0")
        self.mean: float = self._at.item(_BEFORE + BINS) / self._past_reach  # tokens

    @classmethod
    def about(cls, tokens: float) -> Self:
        """The distribution with all weight in the bin of `tokens`."""
        weights = np.zeros(BINS, np.float32)
        weights[bin_of(int(tokens))] = 1.0
        return cls(weights)

    def after(self, tokens: float) -> Remaining:
        """The remaining tokens after `tokens` more tokens, if the trajectory continues beyond them. Without evidence of
        longer lengths, about as many tokens are assumed to remain as have passed since the start of the distribution.
        """
        past = self._past + tokens
        before, reach = self._raw(past)
        if reach <= _NEGLIGIBLE * self._at.item(0):
            return Remaining.about(past)
        later = Remaining(self._weights)
        later._past, later._past_before, later._past_reach = past, before, reach
        later.mean = (self._at.item(_BEFORE + BINS) - before) / reach
        return later

    def beyond(self, tokens: float) -> float:
        """Probability that more than `tokens` tokens remain."""
        return self.cut(tokens)[1]

    def cut(self, tokens: float) -> tuple[float, float]:
        """Mean of the remaining tokens, each length capped at `tokens`, and the probability that more than `tokens`
        tokens remain."""
        if tokens <= 0:
            return 0.0, 1.0
        before, reach = self._raw(self._past + tokens)
        return (before - self._past_before) / self._past_reach, reach / self._past_reach

    def interrupted(self, rate: float, tokens: float = math.inf) -> tuple[float, float]:
        """Probability of an interruption before the end and within `tokens` tokens, and the mean tokens before it,
        which are 0 if there can be none.

        Interruptions are a Poisson process with `rate` (above 0) per token. Computed bin by bin as the integrals of
        rate * exp(-rate * x) * P(more than x remain), and of x times this integrand.
        """
        start, stop = self._past, min(self._past + tokens, EDGES[-1])
        if stop <= start:
            return 0.0, 0.0
        edges = np.array(EDGES)
        points = np.concatenate(([start], edges[(edges > start) & (edges < stop)], [stop]))
        reach = np.interp(points, edges, self._at[:_BEFORE]) / self._past_reach
        x, wide, first = points[:-1] - start, np.diff(points), reach[:-1]
        slope, by = np.diff(reach) / wide, rate * wide
        # Moments of rate * exp(-rate * u) for u up to `wide`. A small moment would be a difference of large terms.
        stays = np.exp(-by)
        one = np.where(by < _SERIES, by * wide * (1 / 2 - by / 3), -np.expm1(-by) / rate - wide * stays)
        two = np.where(by < _SERIES, by * wide**2 * (1 / 3 - by / 4), 2 / rate * one - wide**2 * stays)
        before = np.exp(-rate * x)
        comes = before * (-np.expm1(-by) * first + slope * one)
        probability = min(1.0, float(comes.sum()))
        passed = float((x * comes + before * (first * one + slope * two)).sum())
        return probability, passed / probability if probability > 0 else 0.0

    def quantile(self, q: float) -> float:
        """Quantile `q` (0 to 1) of the remaining tokens."""
        if not 0 <= q <= 1:
            raise ValueError(f"q is {q}; a share lies between 0 and 1")
        wanted = (1 - q) * self._past_reach
        reach = self._at[:_BEFORE]
        # Bin of the last edge that the weight `wanted` reaches.
        bin_ = max(0, min(BINS, int(np.searchsorted(-reach, -wanted, side="right"))) - 1)
        low, high = reach.item(bin_), reach.item(min(BINS, bin_ + 1))
        part = (low - wanted) / (low - high) if low > high else 0.0
        return max(0.0, EDGES[bin_] + part * (EDGES[min(BINS, bin_ + 1)] - EDGES[bin_]) - self._past)

    def _raw(self, tokens: float) -> tuple[float, float]:
        """The weighted tokens before the length `tokens`, and the weight at or beyond this length. Both count from the
        start of the distribution.
        """
        item = self._at.item
        bin_ = bisect_right(EDGES, tokens) - 1
        if bin_ >= BINS:
            return item(_BEFORE + BINS), 0.0
        start, edge = EDGES[bin_], item(bin_)
        into = tokens - start
        reach = edge + (item(bin_ + 1) - edge) * into / (EDGES[bin_ + 1] - start)
        return item(_BEFORE + bin_) + (edge + reach) / 2 * into, reach


def redistributed(finished: Histogram, running: Histogram) -> Histogram:
    """Shares by bin of the lengths of all trajectories, from the final bins of `finished` and the present bins of
    `running` trajectories.

    This is the product-limit estimator (Kaplan and Meier 1958). A running trajectory is at risk in all bins below its
    own; within its own bin it may end at any time. The share of lengths beyond all finished trajectories is assigned to
    the bin one octave beyond the longest trajectory, at about twice its length. At least one weight must be above 0.
    """
    at_risk = finished.copy()
    at_risk[:-1] += running[1:]
    at_risk = at_risk[::-1].cumsum()[::-1]
    hazard = np.divide(finished, at_risk, out=np.zeros_like(finished), where=at_risk > 0)
    np.minimum(hazard, 1, out=hazard)  # rounding may make single-precision sums too small
    survive = (1 - hazard).cumprod()
    shares: Histogram = hazard.copy()
    shares[1:] *= survive[:-1]
    if survive[-1] > 0:
        longest = int((finished + running).nonzero()[0][-1])
        shares[min(BINS - 1, longest + BINS_PER_OCTAVE)] += survive[-1]
    return shares
