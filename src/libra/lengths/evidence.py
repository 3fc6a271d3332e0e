"""Cohorts weighed together, in two memories.

Invariant: a trajectory weighs `2 ** (-n / half_life)`, n being how many have started with later versions, finished or
not; in the opening cohort, those that arrived after it count as well. The recent memory has a shorter half-life and
the same trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.lengths import survival
from libra.lengths.classes import Distribution
from libra.lengths.cohorts import POWERS, Cohort

FORGOTTEN = 1e-3  # trajectories: a bin whose share is worth less than this is left out, with its largest context

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All cohorts together. The columns of [bin, power] arrays are weighted by `POWERS`."""

    weights: Array  # [cohort] of its newest trajectory
    finished: Array  # [bin, power]
    running: Array  # [bin, power]
    passed: Array  # [bin, power]
    sums: Array  # [bin, field] of the finished ones
    peaks: Array  # [bin] tokens: the longest finished one
    risk: Array  # [bin, power] those that could have finished there
    drift: survival.Drift

    @property
    def memory(self) -> tuple[int, int]:
        """Columns of the weights and of their squares in the memory that answers are taken from: the recent one after
        a drift, so that what was true before it is soon forgotten."""
        return (1, 4) if self.drift.drifted else (0, 2)

    @property
    def memory_weights(self) -> Array:
        """[cohort] the weights in that memory."""
        return np.asarray(self.weights ** POWERS[self.memory[0]])

    @property
    def samples(self) -> float:
        """Equally weighted finished trajectories that would average as well (Kish 1965)."""
        weight, square = self.memory
        squares = float(self.finished[:, square].sum())
        return float(self.finished[:, weight].sum()) ** 2 / squares if squares else 0.0

    def shares(self) -> Array:
        """[bin] share of all trajectories whose final context will be there; they sum to 1."""
        weight, _ = self.memory
        return survival.shares(self.finished[:, weight], self.running[:, weight], self.passed[:, weight])

    def distribution(self, ahead: Cohort, bins_per_octave: int) -> Distribution:
        """The bins that are not forgotten. What a trajectory of some length is like is taken from the slow memory, as
        it changes less than how many there are; in a bin that only running ones have reached, from `ahead`."""
        weight, square = self.memory
        shares = self.shares()
        started = float((self.finished[:, weight] + self.running[:, weight]).sum())
        kept = np.flatnonzero(shares * started >= FORGOTTEN)
        finished = self.finished[kept, weight] > 0
        counts = np.where(finished, self.finished[kept, 0], ahead.counts[kept, 0])
        sums = np.where(finished[:, None], self.sums[kept], ahead.sums[kept])
        share = shares[kept] / shares[kept].sum()
        return Distribution(
            shares=share,
            sums=sums * (share / counts)[:, None],
            lower=np.exp2(kept / bins_per_octave),
            peaks=np.maximum(self.peaks, ahead.peaks)[kept],
            log_survival_variance=survival.log_survival_variance(
                self.finished[:, weight], self.risk[:, weight], self.risk[:, square]
            )[kept],
            samples=self.samples,
        )


def weigh(cohorts: Sequence[Cohort], half_life: float) -> Evidence:
    """`cohorts` in order of their versions, the opening one first."""
    started = np.array([cohort.started for cohort in cohorts])
    behind = np.cumsum(started[::-1])[::-1] - started
    weights = np.exp2(-behind / half_life)
    powers = weights[:, None] ** POWERS
    counts = np.array([cohort.counts for cohort in cohorts])
    finished = np.einsum("cbp,cp->bp", counts, powers)
    running = np.einsum("cb,cp->bp", np.array([cohort.running for cohort in cohorts]), powers)
    passed = np.einsum("cb,cp->bp", np.array([cohort.passed for cohort in cohorts]), powers)
    risk = survival.at_risk(finished, running, passed)
    return Evidence(
        weights=weights,
        finished=finished,
        running=running,
        sums=np.einsum("cbf,c->bf", np.array([cohort.sums for cohort in cohorts]), weights),
        passed=passed,
        peaks=np.max([cohort.peaks for cohort in cohorts], axis=0),
        risk=risk,
        drift=survival.drift(finished, risk),
    )
