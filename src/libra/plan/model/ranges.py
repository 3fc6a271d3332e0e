"""What every range of classes would ask of every engine option, so that a step of given length is kept.

Invariant: for a given length of the step all that pricing knows of engines is one integer for each shape and range: the
fewest engines that keep the step. A range is classes `first..last`, both included; it may end only where the next class
is longer. The numbers agree with `libra.plan.options.price` to a relative 1e-9, on the side of fewer engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.price import fixed_seconds
from libra.plan.problem import EngineOption, Problem, TrainingOption

Range = tuple[int, int, int]  # shape, first class, last class

NEVER = 2**30  # engines: more than any pool has; the shape cannot serve the range in time, or at all

_SLACK = 1e-9  # relative: a step that is just kept must not miss an engine for rounding

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class RangeTable:
    """All ranges of one problem, for one router history: `tried` is whether the ranges run already.

    What no step changes is kept by entry: an option, and a range that exists and whose longest context it holds.
    """

    def __init__(self, problem: Problem, tried: bool) -> None:
        self.problem = problem
        shapes = {shape: number for number, shape in enumerate(problem.shapes)}
        options = sorted(problem.engines, key=lambda option: shapes[option.shape])
        self._starts = [i for i, it in enumerate(options) if i == 0 or it.shape != options[i - 1].shape]
        held = _ranges_held(problem, options)
        self._tables = held.shape
        self._entries = np.nonzero(held)  # option, first, last
        routers = np.array(problem.recall_known if tried else problem.recall_possible)  # [router, class]
        most_rows = max(len(option.work) for option in options)
        classes = len(problem.peaks)
        work = np.zeros((len(options), most_rows, classes))
        for o, option in enumerate(options):
            work[o, : len(option.work)] = option.work
        self._work = self._by_entry(_asked(work, routers).max(axis=1))  # [router, entry]
        self._refresh = self._by_entry(_asked(_rows(options, "refresh"), routers)[:, 0])
        self._refreshes = bool(self._refresh.any())
        residence = _longest(np.array([option.residence for option in options]) * np.array(problem.expected))
        self._residence = residence[self._entries]
        self._residences = np.unique(self._residence)
        self._stall = np.array([option.stall for option in options])[:, None]
        most_lines = max(1, max(len(option.generates) for option in options))
        self._generates, self._waits = np.zeros((2, most_lines, len(options), classes))
        for o, option in enumerate(options):
            for line, (generates, waits) in enumerate(zip(option.generates, option.waits, strict=True)):
                self._generates[line, o], self._waits[line, o] = generates, waits
        forgets = np.array([bool(option.refill) for option in options])
        self._forgets = np.flatnonzero(forgets[self._entries[0]])
        self._refill, self._filled = (
            self._by_entry(_asked(_rows(options, field), routers)[:, 0])[:, self._forgets]
            for field in ("refill", "kv_occupancy")
        )

    def engines(self, training: TrainingOption, step: float) -> Counts:
        """[shape, first, last] fewest engines with which a step of `step` seconds is kept while training so.

        `NEVER` where no number of engines keeps it, or the range does not exist.
        """
        limit = float(self._limit(fixed_seconds(self.problem, training), step))
        option, _, last = self._entries
        usable = self._usable(limit, step * (1 + _SLACK))[option, last]
        with np.errstate(divide="ignore", invalid="ignore"):  # a step of 0 seconds, which nothing keeps
            asked = self._work + self._refresh / step if self._refreshes else self._work
            count = asked.max(axis=0) / usable
            if len(self._forgets):
                forgotten = self._forgetting(asked[:, self._forgets], usable[self._forgets]).max(axis=0)
                count[self._forgets] = np.maximum(count[self._forgets], forgotten)
            count = np.maximum(1.0, np.ceil(count * (1 - _SLACK)))
        kept = (usable > 0) & (self._residence <= limit) & (count < NEVER)
        table = np.full(self._tables, NEVER, dtype=np.int64)
        table[self._entries] = np.where(kept, count, NEVER)
        return table if len(self._starts) == len(table) else np.minimum.reduceat(table, self._starts)

    def _forgetting(self, asked: Floats, usable: Floats) -> Floats:
        """[router, entry] engines n whose caches forget: all returns, or as many as n forget, the larger root of
        usable * n^2 - (asked - refill) * n - refill * filled = 0."""
        linear = asked - self._refill
        root = linear + np.sqrt(linear**2 + 4 * usable * self._refill * self._filled)
        return np.asarray(np.minimum(asked + self._refill, root / 2) / usable)

    def _by_entry(self, table: Floats) -> Floats:
        """[router, entry] of what is [option, router, first, last]."""
        option, first, last = self._entries
        return np.ascontiguousarray(table[option, :, first, last].T)

    def ranks(self, fixed: Floats, step: float) -> Floats:
        """[training option] for options that take `fixed` seconds after a step's last trajectory. Those of equal rank
        leave `engines` the same table, and one of a higher rank asks for no more."""
        limit = self._limit(fixed, step)
        if self.problem.synchronous or self.problem.shared:
            return limit
        return np.searchsorted(self._residences, limit, side="right").astype(float)

    def _limit(self, fixed: Floats | float, step: float) -> Floats:
        """Seconds that a trajectory may take."""
        return np.asarray((1 + self.problem.staleness) * step * (1 + _SLACK) - fixed)

    def _usable(self, limit: float, step: float) -> Floats:
        """[option, last] seconds that an engine may work in a step whose trajectories take at most `limit`; not
        above 0 where it keeps no step. More of them the longer the step is."""
        within = limit - self._stall if self.problem.synchronous else step  # seconds over which the work is spread
        left = (within if self.problem.synchronous else limit) - self._waits  # [line, option, 1, last] to generate in
        with np.errstate(divide="ignore", invalid="ignore"):
            slowed = np.where(self._generates > 0, self._generates * within / left, 0.0)
        usable = np.where((left > 0) | ((left == 0) & (self._generates == 0)), within - slowed, -np.inf).min(axis=0)
        if self.problem.synchronous:
            return np.asarray(usable)
        return np.asarray(usable - self._stall)


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
    need: Counts,
    spare: Sequence[int] = (),
    keeps: bool = False,
) -> Allocation:
    """The allocation of ranges (shape, first, last) with the engines that they need; `spare[shape]` more are in the
    last bucket of their shape. Limits in tokens are the longest contexts of classes, or, where the present buckets are
    kept, theirs."""
    counts = [int(need[r]) for r in cover]
    for s, more in enumerate(spare):
        last = max((k for k, r in enumerate(cover) if r[0] == s), default=None)
        if last is not None:
            counts[last] += more
    ends = [*(problem.peaks[last] for _, _, last in cover[:-1]), problem.longest_context]
    if keeps and problem.current is not None:
        ends = [bucket.up_to for bucket in problem.current.buckets]
    starts = [0, *ends[:-1]]
    buckets = tuple(
        Bucket(problem.shapes[shape], count, above, up_to)
        for (shape, _, _), count, above, up_to in zip(cover, counts, starts, ends, strict=True)
    )
    return Allocation(training.replicas, buckets, training.layout)


def _ranges_held(problem: Problem, options: Sequence[EngineOption]) -> NDArray[np.bool_]:
    """[option, first, last] whether the range exists and the option holds its longest context."""
    classes = len(problem.peaks)
    first, last = np.arange(classes)[:, None], np.arange(classes)[None, :]
    ends = [j == classes - 1 or problem.peaks[j] < problem.peaks[j + 1] for j in range(classes)]
    starts = [True, *ends[:-1]]
    exists = (first <= last) & np.array(starts)[:, None] & np.array(ends)[None, :]
    up_to = np.array([*problem.peaks[:-1], problem.longest_context])
    holds = np.array([option.holds for option in options])
    return np.asarray(exists[None] & (holds[:, None, None] >= up_to[None, None, :]))


def _rows(options: Sequence[EngineOption], field: str) -> Floats:
    """[option, 1, class] one row of prices; 0 of options without."""
    nothing = (0.0,) * len(options[0].residence)
    return np.array([getattr(option, field) or nothing for option in options])[:, None, :]


def _asked(costs: Floats, routers: Floats) -> Floats:
    """[option, row, router, first, last] what the range's bucket is asked for.

    `costs` is [option, row, class]. A bucket gets its classes' work as far as the router brings it there; the first
    one also gets all that goes astray.
    """
    rows = costs[:, :, None, :] * routers  # [option, row, router, class]
    strays = (costs[:, :, None, :] * (1 - routers)).sum(axis=-1)
    sums = _sums(rows)
    sums[..., 0, :] += strays[..., None]
    return sums


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
