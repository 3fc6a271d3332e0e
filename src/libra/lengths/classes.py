"""A distribution of trajectories by final context, and its few classes for pricing.

Invariant: shares sum to 1, and a class is a range of adjacent bins. So every weighted mean over the classes equals the
weighted mean over the bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.lengths.cohorts import LOG_CONTEXT, Sums
from libra.lengths.members import Member, Members, of_classes

TAIL_SHARE = 0.05  # largest share of trajectories in the longest class, if bins allow

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrajectoryClass:
    """Trajectories of similar final context as one weighted class. Fields are means over its trajectories, except
    `share`, `peak_context` and `members`. Lengths are tokens, times are seconds.
    """

    share: float  # fraction of trajectories; the shares of a workload sum to 1
    peak_context: int  # largest context of any trajectory of the class
    mean_context: float  # mean of the final contexts
    generated: float  # G: tokens generated
    context_sum: float  # C: sum of the context length over the generated tokens
    prefill: float  # tokens prefilled with a warm prefix cache: the prompt and each tool return, once
    turns: float
    tool_seconds: float
    before_first_return: float  # fraction of `generated` in the first turn, before any tool return
    # For the price of its longest trajectory; empty: all trajectories are like the mean.
    members: tuple[Member, ...] = ()
    seen: float | None = None  # effective sample size: equally weighted finished trajectories; None: certain


@dataclass(frozen=True, slots=True)
class Distribution:
    """Trajectories by final context: one entry or row for each bin that is not empty, shortest first."""

    shares: Array  # shares of the trajectories, which sum to 1
    sums: Array  # [bin, field of `Sums`]; a column's total is the mean over all trajectories
    lower: Array  # tokens: the bin's lower edge
    peaks: Array  # tokens: the longest final context in the bin
    samples: float  # effective sample size: equally weighted finished trajectories
    members: Members

    def total(self) -> Sums:
        """Means over all trajectories."""
        return Sums(*self.sums.sum(axis=0))

    def quantile(self, q: float) -> float:
        """Quantile `q` of the final context in tokens, with trajectories of a bin spread evenly in the logarithm."""
        upto = np.cumsum(self.shares)
        at = min(int(np.searchsorted(upto, q)), len(upto) - 1)
        inside = min(1.0, 1 - float((upto[at] - q) / self.shares[at]))
        return float(self.lower[at] * (self.peaks[at] / self.lower[at]) ** inside)

    def level_error(self) -> float:
        """Standard error of the mean logarithm of the final context, for independent trajectories."""
        if not self.samples:
            return math.inf
        logs = self.sums[:, LOG_CONTEXT] / self.shares
        mean = float((self.shares * logs).sum())
        return math.sqrt(float((self.shares * (logs - mean) ** 2).sum()) / self.samples)

    def classes(self, limit: int) -> tuple[TrajectoryClass, ...]:
        """At most `limit` classes, shortest first; see `LengthTracker.classes`."""
        starts = partition(self.shares, self.peaks, limit)
        bins = np.split(np.arange(len(self.shares)), starts[1:])
        of_bin = np.repeat(np.arange(len(bins)), [len(its) for its in bins])
        return tuple(
            _class(Sums(*self.sums[its].sum(axis=0)), int(self.peaks[its[-1]]), members, self.samples)
            for its, members in zip(bins, of_classes(self.members, of_bin), strict=True)
        )


def _class(sums: Sums, peak: int, members: tuple[Member, ...], samples: float) -> TrajectoryClass:
    count = float(sums.trajectories)
    return TrajectoryClass(
        share=count,
        peak_context=peak,
        mean_context=float(sums.final_context / count),
        generated=float(sums.generated / count),
        context_sum=float(sums.context_sum / count),
        prefill=float(sums.prefill / count),
        turns=float(sums.turns / count),
        tool_seconds=float(sums.tool_seconds / count),
        # Without generated tokens, no token came after a tool return.
        before_first_return=float(sums.first_generated / sums.generated) if sums.generated > 0 else 1.0,
        members=members,
        seen=count * samples,
    )


def partition(shares: Array, peaks: Array, limit: int) -> list[int]:
    """Starts of at most `limit` classes of adjacent bins, by dynamic programming.

    Minimises `sum share * (peak of its class - peak)`, the tokens by which classes overstate the mean final context.
    """
    bins = len(shares)
    below = np.concatenate(([0.0], np.cumsum(shares)))
    tokens_below = np.concatenate(([0.0], np.cumsum(shares * peaks)))
    # cost[start, end] of one class of the bins [start, end)
    class_peak = np.concatenate(([0.0], peaks))
    cost = class_peak * (below - below[:, None]) - (tokens_below - tokens_below[:, None])
    cost[np.tril_indices(bins + 1)] = math.inf
    if limit > 1:
        too_heavy = below[-1] - below[: bins - 1] > TAIL_SHARE
        cost[: bins - 1, bins][too_heavy] = math.inf
    best, choices = cost[0], []
    for _ in range(min(limit, bins) - 1):
        with_one_more = best[:, None] + cost
        choices.append(with_one_more.argmin(axis=0))
        best = with_one_more.min(axis=0)
    starts, end = [], bins
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return [0, *reversed(starts)]
