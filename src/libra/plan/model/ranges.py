"""The fewest engines of every shape, for every range of classes, that keep a step of given length.

Invariant: for a given step length, engine prices reduce to one integer per shape and range: the fewest engines that
keep the step. A range is the classes `first..last`, inclusive; it may end only where the next class is longer. The
numbers agree with `libra.plan.options.price` to a relative 1e-9; a rounding error can only lower a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.price import fixed_seconds
from libra.plan.problem import EngineOption, Problem, TrainingOption
from libra.plan.stays import Stays, least

Range = tuple[int, int, int]  # shape, first class, last class

NEVER = 2**30  # engines: more than any pool has; the shape cannot serve the range in time, or at all

_SLACK = 1e-9  # relative: rounding must not add an engine to a step that is just kept

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = Ints


class RangeTable:
    """All ranges of one problem. With `tried`, the ranges run already, so their routers are known.

    Values that do not depend on the step are stored by entry: an option, and a range whose longest context the option
    holds. Values that depend on the shape of the first range are in `_Times`.
    """

    def __init__(self, problem: Problem, tried: bool) -> None:
        self.problem = problem
        shapes = {shape: number for number, shape in enumerate(problem.shapes)}
        options = self._options = sorted(problem.engines, key=lambda option: shapes[option.shape])
        self._starts = [i for i, it in enumerate(options) if i == 0 or it.shape != options[i - 1].shape]
        held = _ranges_held(problem, options)
        self._tables = held.shape
        self._entries = np.nonzero(held)  # option, first, last
        self._recall = problem.recall_known if tried else problem.recall_possible
        routers = np.array(self._recall)  # [router, class]
        most_rows = max(len(option.work) for option in options)
        classes = len(problem.peaks)
        work = np.zeros((len(options), most_rows, classes))
        for o, option in enumerate(options):
            work[o, : len(option.work)] = option.work
        self._work = self._by_entry(_asked(work, routers).max(axis=1))  # [router, entry]
        self._refresh = self._by_entry(_asked(_rows(options, "refresh"), routers)[:, 0])
        self._refreshes = bool(self._refresh.any())
        self._stall = np.array([option.stall for option in options])[:, None]
        # Stays of longer classes, which begin in a first range and then leave it.
        self._leaving = [problem.elsewhere.begun_on(option.stays, self._recall) for option in options]
        self._times: dict[int | None, _Times] = {}
        forgets = np.array([bool(option.refill) for option in options])
        self._forgets = np.flatnonzero(forgets[self._entries[0]])
        self._refill, self._filled = (
            self._by_entry(_asked(_rows(options, field), routers)[:, 0])[:, self._forgets]
            for field in ("refill", "kv_occupancy")
        )

    def engines(self, training: TrainingOption, step: float, begin: int | None = None) -> Counts:
        """[shape, first, last] fewest engines that keep a step of `step` seconds with this training option.
        Trajectories begin on the shape `begin`; None: on the best shape for each range, which gives a lower bound.
        `NEVER` if no number of engines keeps the step, or the range does not exist.
        """
        limit = float(self._limit(fixed_seconds(self.problem, training), step))
        times = self._times_of(begin)
        option, first, last = self._entries
        usable = self._usable(times, limit, step * (1 + _SLACK))[np.minimum(first, 1), option, last]
        with np.errstate(divide="ignore", invalid="ignore"):  # a step of 0 seconds, which no plan keeps
            asked = self._work + self._refresh / step if self._refreshes else self._work
            count = asked.max(axis=0) / usable
            if len(self._forgets):
                forgotten = self._forgetting(asked[:, self._forgets], usable[self._forgets]).max(axis=0)
                count[self._forgets] = np.maximum(count[self._forgets], forgotten)
            count = np.maximum(1.0, np.ceil(count * (1 - _SLACK)))
        kept = times.possible & (usable > 0) & (times.residence <= limit) & (count < NEVER)
        table = np.full(self._tables, NEVER, dtype=np.int64)
        table[self._entries] = np.where(kept, count, NEVER)
        return table if len(self._starts) == len(table) else np.minimum.reduceat(table, self._starts)

    def _times_of(self, begin: int | None) -> _Times:
        """The times for trajectories that begin on the shape `begin`, cached, since a search needs few shapes."""
        if begin not in self._times:
            shapes = self.problem.shapes if begin is None else (self.problem.shapes[begin],)
            own = [option.stays for option in self._options]
            there = least([self.problem.begins(shape) for shape in shapes])
            later = [stays.begun_on(there, self._recall) for stays in own]
            begins = np.array([option.shape in shapes for option in self._options])
            option, first, _ = self._entries
            stays = (own, later, self._leaving)
            self._times[begin] = _times(stays, self._entries, self.problem.expected, (first > 0) | begins[option])
        return self._times[begin]

    def _forgetting(self, asked: Floats, usable: Floats) -> Floats:
        """[router, entry] fewest engines n for options whose caches evict contexts. With enough engines, all returns
        may be refilled. With fewer, only the returns whose contexts n engines evict: n is then the larger root of
        usable * n^2 - (asked - refill) * n - refill * filled = 0. The smaller n counts.
        """
        linear = asked - self._refill
        root = linear + np.sqrt(linear**2 + 4 * usable * self._refill * self._filled)
        return np.asarray(np.minimum(asked + self._refill, root / 2) / usable)

    def _by_entry(self, table: Floats) -> Floats:
        """[router, entry] values of a table [option, router, first, last]."""
        option, first, last = self._entries
        return np.ascontiguousarray(table[option, :, first, last].T)

    def ranks(self, fixed: Floats, step: float) -> Floats:
        """[training option] rank of options that take `fixed` seconds after a step's last trajectory. Options of equal
        rank have equal tables of `engines`; an option of a higher rank needs no more engines.
        """
        limit = self._limit(fixed, step)
        if self.problem.synchronous or self.problem.shared:
            return limit
        every = [self._times_of(begin).residence for begin in range(len(self.problem.shapes))]
        return np.searchsorted(np.unique(every), limit, side="right").astype(float)

    def _limit(self, fixed: Floats | float, step: float) -> Floats:
        """Longest time of a trajectory, in seconds, that keeps the step."""
        return np.asarray((1 + self.problem.staleness) * step * (1 + _SLACK) - fixed)

    def _usable(self, times: _Times, limit: float, step: float) -> Floats:
        """[0 for a first range, 1 for others; option, last] seconds that an engine may work in a step whose
        trajectories take at most `limit`. 0 or less: the engine cannot keep the step. The seconds increase with the
        step.
        """
        within = limit - self._stall if self.problem.synchronous else step  # seconds over which the work is spread
        left = (within if self.problem.synchronous else limit) - times.waits  # seconds for generation
        with np.errstate(divide="ignore", invalid="ignore"):
            slowed = np.where(times.generates > 0, times.generates * within / left, 0.0)
        usable = np.where((left > 0) | ((left == 0) & (times.generates == 0)), within - slowed, -np.inf).min(axis=0)
        first, later, leaving = usable
        usable = np.stack([np.minimum(first, -_longest_beyond(-leaving, -np.inf)), later])
        if self.problem.synchronous:
            return np.asarray(usable)
        return np.asarray(usable - self._stall)


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of the longest trajectories on each option's engines, for trajectories that begin there and for
    trajectories that continue there.
    """

    possible: NDArray[np.bool_]  # [entry] whether a first range may have the option's shape
    residence: Floats  # [entry]
    # By kind: trajectories that stay on an option's engines, that continue there, and that leave.
    generates: Floats  # [line, kind, option, class]
    waits: Floats  # [line, kind, option, class]


def _times(
    stays: tuple[Sequence[Stays], ...],
    entries: tuple[Ints, ...],
    expected: Sequence[bool],
    possible: NDArray[np.bool_],
) -> _Times:
    first, later, leaving = (np.array([it.residence for it in its]) * np.array(expected) for its in stays)
    longest = np.stack([np.maximum(_longest(first), _longest_beyond(leaving, 0.0)[:, None, :]), _longest(later)])
    option, begins, last = entries
    lines = max(1, *(len(it.generates) for its in stays for it in its))
    generates, waits = np.zeros((2, lines, len(stays), *first.shape))
    for which, its in enumerate(stays):
        for o, it in enumerate(its):
            for line, (generated, waited) in enumerate(zip(it.generates, it.waits, strict=True)):
                generates[line, which, o], waits[line, which, o] = generated, waited
    return _Times(possible, longest[np.minimum(begins, 1), option, begins, last], generates, waits)


def _longest_beyond(seconds: Floats, nothing: float) -> Floats:
    """[option, class] the largest value of all later classes; `nothing` for the last class."""
    none = np.full((len(seconds), 1), nothing)
    after = np.concatenate((seconds[:, 1:], none), axis=1)
    return np.asarray(np.maximum.accumulate(after[:, ::-1], axis=1)[:, ::-1])


def most_buckets(problem: Problem) -> int:
    """Upper bound on the number of buckets, since every bucket has a class."""
    classes = len(problem.peaks)
    return classes if problem.most_buckets is None else min(classes, problem.most_buckets)


def present_ranges(problem: Problem) -> list[Range] | None:
    """The current buckets as ranges of classes; None without buckets, or if they cannot serve the problem unchanged."""
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
    """The allocation of the ranges (shape, first, last) in `cover`, with the engines that they need. `spare[shape]`
    further engines join the last bucket of the shape. Limits of buckets are the longest contexts of classes, in tokens;
    with `keeps`, the limits of the running buckets.
    """
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
    """[option, 1, class] one row of prices; 0 for options without them."""
    nothing = (0.0,) * len(options[0].residence)
    return np.array([getattr(option, field) or nothing for option in options])[:, None, :]


def _asked(costs: Floats, routers: Floats) -> Floats:
    """[option, row, router, first, last] the work of the range's bucket. `costs` is [option, row, class]. A bucket gets
    the share of its classes' work that the router sends there; the first bucket also gets the remaining work of all
    classes.
    """
    rows = costs[:, :, None, :] * routers  # [option, row, router, class]
    strays = (costs[:, :, None, :] * (1 - routers)).sum(axis=-1)
    sums = _sums(rows)
    sums[..., 0, :] += strays[..., None]
    return sums


def _sums(costs: Floats) -> Floats:
    """[..., first, last] sums over ranges of `costs` by class."""
    upto = np.cumsum(np.concatenate((np.zeros((*costs.shape[:-1], 1)), costs), axis=-1), axis=-1)
    return np.asarray(upto[..., None, 1:] - upto[..., :-1, None])


def _longest(residence: Floats) -> Floats:
    """[option, first, last] the largest entry of each range."""
    classes = residence.shape[-1]
    longest = np.repeat(residence[:, None, :], classes, axis=1)
    longest[:, np.tril(np.ones((classes, classes), dtype=bool), -1)] = 0.0
    return np.asarray(np.maximum.accumulate(longest, axis=-1))
