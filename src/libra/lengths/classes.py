"""A distribution of trajectories by final context, and the few classes for pricing it.

Invariant: shares sum to 1 and classes are runs of neighbouring bins, so every weighted mean over the classes is the
weighted mean over the bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.lengths.cohorts import LOG_CONTEXT, Sums
from libra.lengths.members import Member, Members, of_classes

TAIL_SHARE = 0.05  # the class of the longest trajectories holds at most this share of them, if bins allow

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrajectoryClass:
    """Trajectories of similar final context, as one weighted class: means over its trajectories, save for `share`,
    `peak_context` and `members`. Lengths are tokens, times are seconds."""

    share: float  # fraction of trajectories; the shares of a workload sum to 1
    peak_context: int  # no trajectory of the class needs more
    mean_context: float  # of the final contexts
    generated: float  # G: tokens generated
    context_sum: float  # C: sum of the context length over those tokens
    prefill: float  # tokens prefilled with a warm prefix cache: prompt and tool returns, each once
    turns: float
    tool_seconds: float
    before_first_return: float  # fraction of `generated` that belongs to the first turn, before any tool has spoken
    members: tuple[Member, ...] = ()  # by which its longest trajectory is priced; none: all are like the mean
    seen: float | None = None  # equally weighted finished trajectories that are as much evidence; None: certain


@dataclass(frozen=True, slots=True)
class Distribution:
    """Trajectories by final context: one entry, or row, for each bin that holds any, shortest first."""

    shares: Array  # of the trajectories; they sum to 1
    sums: Array  # [bin, field of `Sums`], so that a column's total is the mean over all trajectories
    lower: Array  # tokens: the bin's lower edge
    peaks: Array  # tokens: the longest final context in the bin
    samples: float  # equally weighted finished trajectories that would be as much evidence
    members: Members

    def total(self) -> Sums:
        """Means over all trajectories."""
        return Sums(*self.sums.sum(axis=0))

    def quantile(self, q: float) -> float:
        """Final context in tokens that a share `q` does not exceed, evenly spread in the logarithm within a bin."""
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
        # If nothing was generated, no part of it came after a tool return.
        before_first_return=float(sums.first_generated / sums.generated) if sums.generated > 0 else 1.0,
        members=members,
        seen=count * samples,
    )


def partition(shares: Array, peaks: Array, limit: int) -> list[int]:
    """Start of each of at most `limit` classes of neighbouring bins, by dynamic programming over the last start.

    Minimises `sum share * (peak of its class - peak)`: the tokens by which the mean final context is overstated.
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
