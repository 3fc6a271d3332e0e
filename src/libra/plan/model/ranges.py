"""What every range of classes would ask of every engine option, so that a step of given length is kept.

Invariant: for a given length of the step all that pricing knows of engines is one integer for each shape and range: the
fewest engines that keep the step. A range is classes `first..last`, both included; it may end only where the next class
is longer. The numbers agree with `libra.plan.options.price` to a relative 1e-9, on the side of fewer engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from libra.plan.options.price import fixed_seconds
from libra.plan.problem import Allocation, Bucket, Problem, TrainingOption

Range = tuple[int, int, int]  # shape, first class, last class

NEVER = 2**30  # engines: more than any pool has; the shape cannot serve the range in time, or at all

_SLACK = 1e-9  # relative: a step that is just kept must not miss an engine for rounding

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class RangeTable:
    """All ranges of one problem, for one router history: `tried` is whether the ranges run already."""

    def __init__(self, problem: Problem, tried: bool) -> None:
        self.problem = problem
        self._options = [
            [o for o, option in enumerate(problem.engines) if option.shape == shape] for shape in problem.shapes
        ]
        routers = np.array(problem.recall_known if tried else problem.recall_possible)  # [router, class]
        most_rows = max(len(option.work) for option in problem.engines)
        classes = len(problem.peaks)
        work = np.zeros((len(problem.engines), most_rows, classes))
        for o, option in enumerate(problem.engines):
            work[o, : len(option.work)] = option.work
        refresh = np.array([option.refresh for option in problem.engines])[:, None, :]
        self._work = _asked(work, routers)
        self._refresh = _asked(refresh, routers)
        self._refreshes = bool(refresh.any())
        residence = np.array([option.residence for option in problem.engines]) * np.array(problem.expected)
        self._residence = _longest(residence)
        self._residences = np.unique(self._residence)
        self._stall, self._generates, self._waits = (
            np.array(seconds)[:, None, None]
            for seconds in zip(*((o.stall, o.generates, o.waits) for o in problem.engines), strict=True)
        )
        fills = np.array([option.fills or (0.0,) * classes for option in problem.engines])
        self._least = np.maximum(1.0, np.ceil(_sums(fills) * (1 - _SLACK)))  # engines with room for the range
        self._possible = self._ranges_held()

    def engines(self, training: TrainingOption, step: float) -> Counts:
        """[shape, first, last] fewest engines with which a step of `step` seconds is kept while training so.

        `NEVER` where no number of engines keeps it, or the range does not exist.
        """
        limit = self._limit(training, step)
        usable = self._usable(limit, step * (1 + _SLACK))
        asked = self._work
        if self._refreshes:
            asked = asked + self._refresh / step
        with np.errstate(divide="ignore", invalid="ignore"):
            count = np.maximum(self._least, np.ceil(asked / usable * (1 - _SLACK)))
        kept = self._possible & (usable > 0) & (self._residence <= limit)
        count = np.where(kept & (count < NEVER), count, NEVER)
        return np.array([count[options].min(axis=0) for options in self._options]).astype(np.int64)

    def rank(self, training: TrainingOption, step: float) -> float:
        """Training options of equal rank leave `engines` the same table."""
        limit = self._limit(training, step)
        if self.problem.synchronous or self.problem.shared:
            return limit
        return float(np.searchsorted(self._residences, limit, side="right"))

    def _limit(self, training: TrainingOption, step: float) -> float:
        """Seconds that a trajectory may take."""
        return (1 + self.problem.staleness) * step * (1 + _SLACK) - fixed_seconds(self.problem, training)

    def _usable(self, limit: float, step: float) -> Floats:
        """[option, 1, 1] seconds that an engine may work in a step whose trajectories take at most `limit`; not above 0
        where it keeps no step. More of them the longer the step is."""
        if self.problem.synchronous:
            return np.asarray(limit - self._stall - self._generates - self._waits)
        if not self.problem.shared:
            return np.asarray(step - self._stall)
        left = limit - self._waits
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(left > 0, step - self._stall - self._generates * step / left, -np.inf)

    def _ranges_held(self) -> NDArray[np.bool_]:
        """[option, first, last] whether the range exists and the option holds its longest context."""
        problem = self.problem
        classes = len(problem.peaks)
        first, last = np.arange(classes)[:, None], np.arange(classes)[None, :]
        ends = [j == classes - 1 or problem.peaks[j] < problem.peaks[j + 1] for j in range(classes)]
        starts = [True, *ends[:-1]]
        exists = (first <= last) & np.array(starts)[:, None] & np.array(ends)[None, :]
        up_to = np.array([*problem.peaks[:-1], problem.longest_context])
        holds = np.array([option.holds for option in problem.engines])
        return np.asarray(exists[None] & (holds[:, None, None] >= up_to[None, None, :]))


def most_buckets(problem: Problem) -> int:
    """No allocation has more buckets: every bucket has a class."""
    classes = len(problem.peaks)
    return classes if problem.most_buckets is None else min(classes, problem.most_buckets)


def present_ranges(problem: Problem) -> list[Range] | None:
    """The current buckets as ranges of classes; None when there are none, or when they cannot serve as they are."""
    current = problem.current
    if current is None or not current.buckets or current.buckets[-1].up_to < problem.longest_context:
        return None
    found = []
    for bucket in current.buckets:
        members = [j for j, peak in enumerate(problem.peaks) if bucket.above < peak <= bucket.up_to]
        if not members or bucket.shape not in problem.shapes or problem.footprint(bucket.shape)[2] < bucket.up_to:
            return None
        found.append((problem.shapes.index(bucket.shape), members[0], members[-1]))
    return found


def make_allocation(
    problem: Problem,
    training: TrainingOption,
    cover: Sequence[Range],
    counts: Sequence[int],
    ends: Sequence[int] | None = None,
) -> Allocation:
    """The allocation of ranges (shape, first, last) with so many engines; `ends` are its limits in tokens, where they
    are not the longest context of each range's last class."""
    if ends is None:
        ends = [*(problem.peaks[last] for _, _, last in cover[:-1]), problem.longest_context]
    starts = [0, *ends[:-1]]
    buckets = tuple(
        Bucket(problem.shapes[shape], count, above, up_to)
        for (shape, _, _), count, above, up_to in zip(cover, counts, starts, ends, strict=True)
    )
    return Allocation(training.replicas, buckets, training.layout)


def _asked(costs: Floats, routers: Floats) -> Floats:
    """[option, first, last] the largest, over rows and routers, of what the range's bucket is asked for.

    `costs` is [option, row, class]. A bucket gets its classes' work as far as the router brings it there; the first
    one also gets all that goes astray.
    """
    rows = costs[:, :, None, :] * routers  # [option, row, router, class]
    strays = (costs[:, :, None, :] * (1 - routers)).sum(axis=-1)
    sums = _sums(rows)  # [option, row, router, first, last]
    sums[..., 0, :] += strays[..., None]
    return np.asarray(sums.max(axis=(1, 2)))


def _sums(costs: Floats) -> Floats:
    """[..., first, last] sums over ranges of what is given by class."""
    upto = np.cumsum(np.concatenate((np.zeros((*costs.shape[:-1], 1)), costs), axis=-1), axis=-1)
    return np.asarray(upto[..., None, 1:] - upto[..., :-1, None])


def _longest(residence: Floats) -> Floats:
    """[option, first, last] the largest entry of each range."""
    classes = residence.shape[-1]
    longest = np.repeat(residence[:, None, :], classes, axis=1)
    longest[:, np.tril(np.ones((classes, classes), dtype=bool), -1)] = 0.0
    return np.asarray(np.maximum.accumulate(longest, axis=-1))
