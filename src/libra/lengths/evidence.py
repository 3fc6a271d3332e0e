"""Weighted evidence of all cohorts, in two memories: estimates that include running trajectories, and a test for drift.

Invariant: a trajectory weighs `2 ** (-n / half_life)` if n trajectories, finished or not, started with later versions.
In the opening cohort, later arrivals count in n, too. The recent memory has the same trajectories with a shorter
half-life. A running trajectory is at risk in exactly the bins that it has reached. Without running trajectories, shares
are those of the plain weighted histogram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.lengths.classes import Distribution
from libra.lengths.cohorts import COUNTS, LOG_CONTEXT, OCTAVES, POWERS, SUMS, Cell, Cohort, Table
from libra.lengths.members import Members, spread

FALSE_ALARM_RATE = 0.01  # chance that one test of stationary trajectories reports a drift
FORGOTTEN = 1e-3  # weight in trajectories below which a bin, with its largest context, is left out

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drift:
    """Result of the test whether recent trajectories end after a different amount of work (`cohorts.work`) than older
    trajectories.
    """

    distance: float  # largest difference between recent and older trajectories, as a share of all
    threshold: float  # threshold that chance exceeds in at most `FALSE_ALARM_RATE` of tests
    drifted: bool


def at_risk(finished: Array, running: Array, passed: Array) -> Array:
    """[bin, ...] number of trajectories at risk, which could have finished in the bin.

    All trajectories beyond a bin count fully. A trajectory that runs in the bin counts by the part that it has passed
    (the actuarial estimate, with the actual part instead of half). `finished` and `running` count trajectories by the
    bin of their current length; `passed` is the sum of the passed parts.
    """
    reached = np.cumsum((finished + running)[::-1], axis=0)[::-1]
    beyond = np.zeros_like(reached)
    beyond[:-1] = reached[1:]
    return beyond + finished + passed


def hazard(finished: Array, risk: Array) -> Array:
    """[bin] share of the trajectories at risk in a bin that finish in the bin."""
    return np.divide(finished, risk, out=np.zeros_like(risk), where=risk > 0)


def lift(finished: Array, running: Array, passed: Array) -> Array:
    """[bin] weight of the trajectories that each finished one in the bin represents: itself, and its share of earlier
    censored trajectories.

    It is the inverse probability that a trajectory is still observed in the bin (Robins & Rotnitzky 1992), estimated by
    the product limit. The sum of `lift * finished` up to a bin is that bin's cumulative share of the total (Satten &
    Datta 2001). All weights are 1 if no trajectory is running.
    """
    risk = at_risk(finished, running, passed)
    total = float((finished + running).sum())
    seen = np.divide(total, risk, out=np.zeros_like(risk), where=risk > 0)
    # The share that reaches each bin: the product limit (Kaplan & Meier 1958) of the hazards.
    outlived = np.concatenate(([1.0], np.cumprod(1 - hazard(finished, risk))[:-1]))
    return np.asarray(outlived * seen)


def find_drift(finished: Array, risk: Array) -> Drift:
    """Compare the shares of trajectories beyond each bin of work in a slow and in a fast memory.

    The columns of both arrays are weighted by `cohorts.POWERS`: s, f, s**2, s f and f**2, for the weights s and f of a
    trajectory in the two memories. Suppose that hazards h do not depend on the weights. Then the ratio of the two
    shares, minus 1, is a martingale in the work, whichever trajectories are still running. In each bin, its variance C
    grows by `h / (1 - h) * sum (f / F - s / S)**2` over the trajectories at risk, with total weights F and S. The
    martingale tends to a Brownian motion W(C), and `sqrt(n) W(C) / (1 + n C)` is a Brownian bridge for any n (Hall &
    Wellner 1980). The largest excursion of the bridge exceeds x with a probability of at most `2 * exp(-2 * x**2)`
    (Kolmogorov's distribution). Let 1 / n be the sum over all trajectories. Without running trajectories, `1 / (1 + n
    C)` is then about the share itself, and the test is that of Kolmogorov and Smirnov. The threshold is the x for
    `FALSE_ALARM_RATE`; binning can only lower the rate.

    Assumed: trajectories are independent (similar samples of one prompt raise the rate), and weights are spread over
    enough trajectories for the limit (half-lives of a few dozen). The rate is per test: tests of disjoint trajectories
    each have their own chance of a false alarm. With at most one trajectory there is no drift.
    """
    ending, recent_ending = hazard(finished[:, 0], risk[:, 0]), hazard(finished[:, 1], risk[:, 1])
    known = (risk[:, 1] > 0) & (ending < 1)  # from the first bin to the first bin that no trajectory outlives
    slow, fast, slow_squares, products, fast_squares = risk[known].T
    ending, recent_ending = ending[known], recent_ending[known]
    # Below 1e-12, the three terms cancel to rounding noise, and the two memories are still equal.
    spread = np.maximum(fast_squares / fast**2 - 2 * products / (fast * slow) + slow_squares / slow**2, 1e-12)
    if not spread.size:
        return Drift(distance=0.0, threshold=1.0, drifted=False)  # all trajectories end in the first bin
    variance = np.cumsum(ending / (1 - ending) * spread)
    ratio = np.cumprod((1 - recent_ending) / (1 - ending))
    # Censoring can only increase the variance; if its estimate is smaller, the share itself is the scale.
    scale = np.maximum(1 + variance / spread[0], 1 / np.cumprod(1 - ending))
    distance = float(np.abs((ratio - 1) / scale).max())
    threshold = math.sqrt(math.log(2 / FALSE_ALARM_RATE) / 2 * float(spread[0]))
    return Drift(distance, threshold, distance > threshold)


@dataclass(frozen=True, slots=True)
class WeighedCohorts:
    """The evidence of all cohorts. Columns of [bin, power] arrays are weighted by `POWERS`. A finished trajectory
    counts for itself and for the running trajectories that it represents (`lift`).
    """

    weights: Array  # [cohort] weight of each of its trajectories in the slow memory
    finished: Array  # [bin, power]
    ended: Array  # [bin, power] including the running trajectories that are furthest in work or context
    sums: Array  # [bin, field] of the finished trajectories
    peaks: Array  # [bin] tokens of the longest finished trajectory
    cells: Indices  # [cell, work and context bin] of all ended trajectories
    cells_ended: Array  # [cell, power] as `ended`
    cells_finished: Array  # [cell] finished trajectories, weighted by the first power
    cells_sums: Array  # [cell, field] of the finished trajectories
    by_work: Array  # [work bin] share of all trajectories that end there
    log_contexts: Array  # [work bin] mean logarithm of their final context
    drift: Drift

    @property
    def memory(self) -> tuple[int, int]:
        """Columns of the weights and their squares in the memory that answers use: after a drift the recent memory,
        which soon forgets earlier evidence.
        """
        return (1, 4) if self.drift.drifted else (0, 2)

    @property
    def memory_weights(self) -> Array:
        """[cohort] the weights in the memory that answers use."""
        return np.asarray(self.weights ** POWERS[self.memory[0]])

    @property
    def samples(self) -> float:
        """Effective sample size: equally weighted finished trajectories of the same precision (Kish 1965)."""
        weight, square = self.memory
        squares = float(self.finished[:, square].sum())
        return float(self.finished[:, weight].sum()) ** 2 / squares if squares else 0.0

    def distribution(self, ahead: Cohort, bins_per_octave: int) -> Distribution:
        """The distribution over the bins that are not forgotten.

        The means of a bin come from the slow memory, since they change less than the bin's share. In a bin that only
        running trajectories have reached, the means come from `ahead`.
        """
        weight, _ = self.memory
        ended = self.ended[:, weight]
        kept = np.flatnonzero(ended >= FORGOTTEN)
        ahead_counts, ahead_sums = np.zeros(ahead.bins), np.zeros_like(self.sums)
        np.add.at(ahead_counts, ahead.table.cells[:, 1], ahead.counts[:, 0])
        np.add.at(ahead_sums, ahead.table.cells[:, 1], ahead.sums)
        finished = self.finished[kept, weight] > 0
        counts = np.where(finished, self.finished[kept, 0], ahead_counts[kept])
        sums = np.where(finished[:, None], self.sums[kept], ahead_sums[kept])
        share = ended[kept] / ended[kept].sum()
        peaks = np.maximum(self.peaks, ahead.peaks)[kept]
        return Distribution(
            shares=share,
            sums=sums * (share / counts)[:, None],
            lower=np.exp2(kept / bins_per_octave),
            peaks=peaks,
            samples=self.samples,
            members=self._members(ahead, kept, peaks),
        )

    def _members(self, ahead: Cohort, kept: Indices, peaks: Array) -> Members:
        """Members of the cells in the bins that are not forgotten."""
        weight, _ = self.memory
        rows = np.flatnonzero(np.isin(self.cells[:, 1], kept) & (self.cells_ended[:, weight] > 0))
        cells, ended = self.cells[rows], self.cells_ended[rows, weight]
        counts, sums = self.cells_finished[rows, None], self.cells_sums[rows]
        running = {cell: values for cell, values in ahead.table.items()}
        for row in np.flatnonzero(counts[:, 0] <= 0):
            values = running[Cell(*cells[row].tolist())]
            counts[row], sums[row] = values[COUNTS][0], values[SUMS]
        bins = np.searchsorted(kept, cells[:, 1])
        return spread(bins, ended / ended.sum(), sums / counts, peaks[bins])


def weigh(cohorts: Sequence[Cohort], half_life: float) -> WeighedCohorts:
    """Weigh `cohorts`, ordered by version, with the opening cohort first.

    Time, not length, decides which trajectories finish. So the product limit is over work, and each end has a final
    context as its mark. Running trajectories with more work or context than any finished trajectory are assumed to end
    now (Efron 1967), as there is no evidence beyond them.
    """
    started = np.array([cohort.started for cohort in cohorts])
    behind = np.cumsum(started[::-1])[::-1] - started
    weights = np.exp2(-behind / half_life)
    powers = weights[:, None] ** POWERS
    bins = cohorts[0].bins

    of_finished, cells, values = _rows([cohort.table for cohort in cohorts])
    finished = values[:, COUNTS] * powers[of_finished]
    sums = values[:, SUMS] * weights[of_finished, None]
    of_running, running_cells, values = _rows([cohort.running for cohort in cohorts])
    running, passed = (column[:, None] * powers[of_running] for column in values.T)
    furthest = np.concatenate((cells, running_cells)).max(axis=0)
    no_more = (running_cells == furthest).any(axis=1)
    ends = np.concatenate((finished, running[no_more]))
    end_cells = np.concatenate((cells, running_cells[no_more]))

    work_bins = int(furthest[0]) + 1
    finished_by_work = _summed(cells[:, 0], finished, work_bins)
    running_by_work, passed_by_work = (_summed(running_cells[:, 0], each, work_bins) for each in (running, passed))
    drift = find_drift(finished_by_work, at_risk(finished_by_work, running_by_work, passed_by_work))

    still, still_passed = (_summed(running_cells[~no_more, 0], each[~no_more], work_bins) for each in (running, passed))
    by_work = _summed(end_cells[:, 0], ends, work_bins)
    slow, fast = (lift(by_work[:, m], still[:, m], still_passed[:, m]) for m in (0, 1))
    factors = np.column_stack((slow, fast, slow**2, slow * fast, fast**2))
    ends *= factors[end_cells[:, 0]]
    finished_by_context = _summed(cells[:, 1], ends[: len(finished)], bins)
    ended = _summed(end_cells[:, 1], ends, bins)

    ended_cells, of_cell = np.unique(end_cells, axis=0, return_inverse=True)
    of_finished_cell = of_cell[: len(finished)]

    memory = ends[:, int(drift.drifted)]
    # A running trajectory that ends in its present bin is assumed to end in the middle of the bin.
    log_contexts = (end_cells[:, 1] + 0.5) * math.log(2) * OCTAVES / bins
    log_contexts[: len(finished)] = sums[:, LOG_CONTEXT] / finished[:, 0]
    shares = np.bincount(end_cells[:, 0], memory, work_bins)
    logs = np.bincount(end_cells[:, 0], memory * log_contexts, work_bins)
    return WeighedCohorts(
        weights=weights,
        finished=finished_by_context,
        ended=ended,
        sums=_summed(cells[:, 1], sums * slow[cells[:, 0], None], bins),
        peaks=np.max([cohort.peaks for cohort in cohorts], axis=0),
        cells=ended_cells,
        cells_ended=_summed(of_cell, ends, len(ended_cells)),
        cells_finished=np.bincount(of_finished_cell, finished[:, 0], len(ended_cells)).astype(float),
        cells_sums=_summed(of_finished_cell, sums, len(ended_cells)),
        by_work=shares / shares.sum(),
        log_contexts=np.divide(logs, shares, out=np.zeros(work_bins), where=shares > 0),
        drift=drift,
    )


def _rows(tables: Sequence[Table]) -> tuple[Indices, Indices, Array]:
    """[row] number of the table, [row, work and context bin], and [row, column], for the rows of all tables. Rows are
    in the order of the cells, so that sums do not depend on the order of arrival.
    """
    of_table = np.repeat(np.arange(len(tables)), [len(table.values) for table in tables])
    cells = np.concatenate([table.cells for table in tables])
    order = np.lexsort(cells.T)
    return of_table[order], cells[order], np.concatenate([table.values for table in tables])[order]


def _summed(bins: Indices, rows: Array, size: int) -> Array:
    """[bin, column] sums of the rows of each bin."""
    return np.column_stack([np.bincount(bins, column, size) for column in rows.T])
