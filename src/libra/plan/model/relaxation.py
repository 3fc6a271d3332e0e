"""A relaxation that excludes options and ranges that no plan with a given step can use, without a solver.

Invariant: no plan that keeps the step uses an excluded option or range. The options and ranges that remain may still
allow no plan. The relaxation replaces the families `devices[p]` by one weighted sum over all pools (a surrogate
constraint, valid for any weights) and drops `one_bucket_per_shape`. The cheapest cover of all classes is then a
shortest path (Bellman 1958). No plan uses a range if all paths through it are too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain

import numpy as np

from libra.plan.model.ranges import NEVER, Counts, Floats, Range, RangeTable, most_buckets
from libra.plan.options.price import fixed_seconds
from libra.plan.problem import Problem, TrainingOption

_ROUNDS = 6  # updates of the weights, while a pool is overdrawn
_UNREACHED = 1e15  # weighted devices: more than any cluster has
_MORE = 1 + 1e-9  # factor on room that exceeds rounding errors


@dataclass(frozen=True, slots=True)
class Candidate:
    """A training option, with the engines that each shape then needs for each range; NEVER for an excluded range. The
    solver has one candidate for each shape of the first range.
    """

    training: TrainingOption
    engines: Counts  # [shape, first, last]


class Relaxation:
    """Bounds for one problem. The engines in `table` must be lower bounds for every range."""

    def __init__(self, problem: Problem, table: RangeTable) -> None:
        self.problem = problem
        self._table = table
        self._pools = [pool.name for pool in problem.pools]
        uses = [problem.uses(shape) for shape in problem.shapes]
        self._uses = np.array([[used.get(pool, 0) for pool in self._pools] for used in uses])  # [shape, pool] devices
        self._available = np.array([float(pool.devices) for pool in problem.pools])
        self._weights = np.ones(len(self._pools))
        self._most_buckets = most_buckets(problem)
        # Training options, fewest devices first, and their properties that do not depend on the step.
        possible = [option for option in problem.training if option.devices <= problem.pool(option.pool).devices]
        self._training = sorted(possible, key=lambda option: (option.devices, option.seconds, option.layout))
        self._seconds = np.array([option.seconds for option in self._training])
        self._fixed = np.array([fixed_seconds(problem, option) for option in self._training])
        kinds = [(option.pool, self._distance(option)) for option in self._training]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self._kinds = np.array([numbers[kind] for kind in kinds])
        self._rooms = np.array([self._room(option) for option in self._training])  # [option, pool] left to generate

    @property
    def weights(self) -> Floats:
        """[shape] weight of one engine: its devices, which weigh more in pools that were overdrawn."""
        return np.asarray(self._uses @ self._weights)

    def candidates(self, step: float) -> Iterator[Candidate]:
        """Yield training options that may keep the step, fewest devices first, each with its remaining ranges.

        If there is no such option, no plan keeps the step. The iterator is lazy: use it up before the next call. Among
        options that are equal for generation and equally far from the running allocation, only the one with the fewest
        devices is kept, unless no device may be idle.
        """
        kept = self._promising(step)
        for _ in range(_ROUNDS if len(self._pools) > 1 else 0):
            first = next(kept, None)
            if first is None:
                return
            overdrawn = self._reweigh(first)
            kept = chain([first], kept)
            if not overdrawn:
                break
            kept = self._reduced(kept, self._weights)
        yield from kept

    @property
    def devices(self) -> Floats:
        """[shape] devices of one engine."""
        return np.asarray(self._uses.sum(axis=1, dtype=float))

    def least_devices(self, candidate: Candidate) -> float:
        """Lower bound on the devices of a plan with the candidate, including those of training."""
        cheapest = _weighed(candidate.engines, self.devices).min(axis=0)
        return candidate.training.devices + float(_least_before(cheapest, self._most_buckets)[-1, -1])

    def with_devices(self, candidates: Iterable[Candidate], most: int) -> list[Candidate]:
        """The candidates reduced to plans of at most `most` devices, including those of training."""
        left = list(candidates)
        # The second round excludes plans that overdraw a pool: in pools that were overdrawn, devices and room weigh
        # more.
        for more in (np.zeros(len(self._pools)), self._weights / self._weights.min() - 1):
            allowed = (most - it.training.devices + float(self._room(it.training) @ more) * _MORE for it in left)
            reduced = (self._within(it, 1 + more, room) for it, room in zip(list(left), allowed, strict=True))
            left = [candidate for candidate in reduced if candidate is not None]
        return left

    def reduced(self, candidate: Candidate) -> Candidate | None:
        """The candidate without ranges that no plan uses; None if no plan uses the candidate."""
        return next(self._reduced([candidate], self._weights), None)

    def _promising(self, step: float) -> Iterator[Candidate]:
        """Yield the options that leave enough devices for the cheapest cover, fewest devices first, with one option for
        each group that is equal for generation. An option of a higher rank needs no more engines. So the cover of a
        group's highest rank is a bound for the whole group, and most options need no own table.
        """
        weights = self._weights
        rooms = (self._rooms @ weights) * _MORE
        tables: dict[float, tuple[Counts, float]] = {}

        def table(number: int) -> tuple[Counts, float]:
            rank = float(ranks[number])
            if rank not in tables:
                engines = self._table.engines(self._training[number], step)
                cost = _weighed(engines, self._uses @ weights).min(axis=0)
                tables[rank] = engines, float(_least_before(cost, self._most_buckets)[-1, -1])
            return tables[rank]

        quick = np.flatnonzero(self._seconds <= step * (1 + 1e-9))
        ranks = self._table.ranks(self._fixed, step)
        _, different = np.unique(np.array([self._kinds[quick], ranks[quick]]), axis=1, return_index=True)
        left = quick[np.sort(different)]
        # Groups of options of similar rank, in a heap by their first option.
        groups = [(-1, left[np.argsort(ranks[left], kind="stable")])] if len(left) else []
        while groups:
            _, group = heappop(groups)
            if len(group) == 1:
                number = int(group[0])
                option = self._training[number]
                candidate = self._within(Candidate(option, table(number)[0]), weights, float(rooms[number]))
                if candidate is not None:
                    yield candidate
                continue
            for half in np.array_split(group[rooms[group] >= table(group[-1])[1]], 2):
                if len(half):
                    heappush(groups, (int(half.min()), half))

    def _distance(self, option: TrainingOption) -> object:
        """Distance from the running allocation. Among options of equal distance, the one with the fewest devices needs
        the fewest moves.
        """
        current = self.problem.current
        if self.problem.use_all_devices:
            return option.layout, option.replicas
        if current is None:
            return None
        return "current" if option.layout == current.layout else option.replicas

    def _reduced(self, candidates: Iterable[Candidate], weights: Floats) -> Iterator[Candidate]:
        """Yield the candidates, reduced with `weights`, for which a plan is left."""
        for candidate in candidates:
            allowed = float(self._room(candidate.training) @ weights) * _MORE
            left = self._within(candidate, weights, allowed)
            if left is not None:
                yield left

    def _within(self, candidate: Candidate, weights: Floats, allowed: float) -> Candidate | None:
        """The candidate reduced to plans whose generation takes at most `allowed` weighted devices; None if there is no
        such plan.
        """
        room = self._room(candidate.training)
        most = np.where(self._uses > 0, room // np.maximum(self._uses, 1), np.inf).min(axis=1)
        counts = np.where(candidate.engines <= most[:, None, None], candidate.engines, NEVER)
        cost = _weighed(counts, self._uses @ weights)
        cheapest = cost.min(axis=0)
        before = _least_before(cheapest, self._most_buckets)
        if before[-1, -1] > allowed:
            return None
        after = _least_after(cheapest, self._most_buckets)
        around = (before[:-1, :-1, None] + after[-2::-1, None, 1:]).min(axis=0)  # [first, last]
        through = around + cost
        return Candidate(candidate.training, np.where(through <= allowed, counts, NEVER))

    def _room(self, option: TrainingOption) -> Floats:
        """Devices of each pool that are left for generation."""
        room = self._available.copy()
        if not self.problem.colocated:
            room[self._pools.index(option.pool)] -= option.devices
        return room

    def _reweigh(self, candidate: Candidate) -> bool:
        """Increase the weights of devices in overdrawn pools; return whether the cheapest path overdraws any pool."""
        room = np.maximum(1.0, self._room(candidate.training))
        use = np.zeros(len(self._pools))
        for shape, first, last in cheapest_cover(candidate.engines, self.weights, self._most_buckets):
            use += self._uses[shape] * candidate.engines[shape, first, last]
        weights = self._weights * np.exp(np.clip(use / room - 1, -1, 1))
        self._weights = np.maximum(weights / weights.max(), 1e-3)
        return bool((use > room).any())


def cheapest_cover(engines: Counts, weights: Floats, most_buckets: int) -> list[Range]:
    """At most `most_buckets` ranges (shape, first, last) that cover all classes, with the least sum of engines times
    weight. If there is no such cover, some of the ranges need `NEVER` engines.
    """
    cost = _weighed(engines, weights)
    shapes, cheapest = cost.argmin(axis=0), cost.min(axis=0)
    before = _least_before(cheapest, most_buckets)
    cover, end, b = [], cost.shape[-1], most_buckets
    while end > 0:
        first = int((before[b - 1, :end] + cheapest[:end, end - 1]).argmin())
        cover.append((int(shapes[first, end - 1]), first, end - 1))
        end, b = first, max(1, b - 1)
    return cover[::-1]


def _weighed(engines: Counts, weights: Floats) -> Floats:
    """[shape, first, last] weighted devices of ranges; `_UNREACHED` for excluded ranges."""
    return np.where(engines < NEVER, engines * weights[:, None, None], _UNREACHED)


def _least_before(cost: Floats, most_buckets: int) -> Floats:
    """[buckets, class] least cost to cover all classes before the class with at most `buckets` buckets; the last column
    covers all classes. `cost` is [first, last].
    """
    least = np.full((most_buckets + 1, cost.shape[0] + 1), _UNREACHED)
    least[:, 0] = 0.0
    for b in range(1, most_buckets + 1):
        least[b, 1:] = np.minimum(least[b - 1, 1:], (least[b - 1, :-1, None] + cost).min(axis=0))
    return least


def _least_after(cost: Floats, most_buckets: int) -> Floats:
    """[buckets, class] least cost to cover the class and all later ones; 0 in the last column, after all classes."""
    return _least_before(cost[::-1, ::-1].T, most_buckets)[:, ::-1]
