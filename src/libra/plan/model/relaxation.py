"""What can be said without a solver: what is in none of the plans that keep a step of given length.

Invariant: whatever the relaxation leaves out is in no plan that keeps the step; what remains may still not make one. It
replaces the families `devices[p]` by one weighted sum over all pools (a surrogate constraint: any weights are valid)
and drops `one_bucket_per_shape`. The least sum of a cover of all classes is then a shortest path (Bellman 1958), and a
range through which no path is short enough is in no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from libra.plan.model.ranges import NEVER, Counts, Floats, Range, RangeTable, most_buckets
from libra.plan.problem import Problem, TrainingOption

_ROUNDS = 6  # of new weights, when no weights so far settle the question
_UNREACHED = 1e15  # weighted devices: more than any cluster has


@dataclass(frozen=True, slots=True)
class Candidate:
    """A training option and the engines that each shape then needs for each range; NEVER where a range is excluded."""

    training: TrainingOption
    engines: Counts  # [shape, first, last]


class Relaxation:
    """Bounds for one problem; `table` must not ask any range for more engines than a plan would need there."""

    def __init__(self, problem: Problem, table: RangeTable) -> None:
        self.problem = problem
        self._table = table
        self._pools = [pool.name for pool in problem.pools]
        uses = [problem.uses(shape) for shape in problem.shapes]
        self._uses = np.array([[used.get(pool, 0) for pool in self._pools] for used in uses])  # [shape, pool] devices
        self._available = np.array([float(pool.devices) for pool in problem.pools])
        self._weights = np.ones(len(self._pools))
        self._most_buckets = most_buckets(problem)
        possible = [option for option in problem.training if option.devices <= problem.pool(option.pool).devices]
        self._by_devices = sorted(possible, key=lambda option: (option.devices, option.seconds, option.layout))

    @property
    def weights(self) -> Floats:
        """[shape] what one engine weighs: its devices, dearer in pools that were overdrawn."""
        return np.asarray(self._uses @ self._weights)

    def candidates(self, step: float) -> list[Candidate]:
        """Training options that may keep the step, each with what is left of its ranges. None: no plan keeps it.

        Of options that leave generation the same choices and are equally far from what runs, only the one with the
        fewest devices is kept, unless no device may idle.
        """
        kept = self._all_reduced(self._distinct(step))
        for _ in range(_ROUNDS if len(self._pools) > 1 else 0):
            if not kept or not self._reweigh(kept[0]):
                break
            kept = self._all_reduced((candidate.training, candidate.engines) for candidate in kept)
        return kept

    def _distinct(self, step: float) -> list[tuple[TrainingOption, Counts]]:
        """Those options, by devices, that the bound does not rule out at once, and their tables."""
        seen: set[tuple[object, ...]] = set()
        found: list[tuple[float, int, TrainingOption]] = []
        for option in self._by_devices:
            if option.seconds > step * (1 + 1e-9):
                continue
            rank = self._table.rank(option, step)
            key = (option.pool, rank, self._distance(option))
            if key not in seen:
                seen.add(key)
                found.append((rank, len(found), option))
        tables: dict[float, Counts] = {}
        promising = self._promising(sorted(found, key=lambda ranked: ranked[:2]), step, tables)
        return [(option, tables[rank]) for rank, _, option in sorted(promising, key=lambda ranked: ranked[1])]

    def _promising(
        self, ranked: Sequence[tuple[float, int, TrainingOption]], step: float, tables: dict[float, Counts]
    ) -> list[tuple[float, int, TrainingOption]]:
        """Of options ordered by rank those that leave room for the least cover. A higher rank asks for no more engines,
        so the last one's cover bounds those of all of them, and most need no table of their own."""
        if not ranked:
            return []
        rank, _, option = ranked[-1]
        if rank not in tables:
            tables[rank] = self._table.engines(option, step)
        cost = np.where(tables[rank] < NEVER, tables[rank] * self.weights[:, None, None], _UNREACHED).min(axis=0)
        least = _shortest(cost, self._most_buckets)[0][-1, -1]
        left = [each for each in ranked if self._allowed(each[2]) >= least]
        if len({each[0] for each in left} | {rank}) == 1:
            return left
        half = len(left) // 2 if len(left) > 1 else 1
        return [part for half_of in (left[:half], left[half:]) for part in self._promising(half_of, step, tables)]

    def _allowed(self, option: TrainingOption) -> float:
        """Weighted devices that the option leaves to generate."""
        return float(self._room(option) @ self._weights) * (1 + 1e-9)

    def _distance(self, option: TrainingOption) -> object:
        """Options of equal distance from what runs need the fewest moves where they need the fewest devices."""
        current = self.problem.current
        if self.problem.use_all_devices:
            return option.layout, option.replicas
        if current is None:
            return None
        return "current" if option.layout == current.layout else option.replicas

    def _all_reduced(self, options: Iterable[tuple[TrainingOption, Counts]]) -> list[Candidate]:
        reduced = (self._reduced(option, engines) for option, engines in options)
        return [candidate for candidate in reduced if candidate is not None]

    def _reduced(self, option: TrainingOption, engines: Counts) -> Candidate | None:
        room = self._room(option)
        most = np.where(self._uses > 0, room // np.maximum(self._uses, 1), np.inf).min(axis=1)
        counts = np.where(engines <= most[:, None, None], engines, NEVER)
        weight = self.weights[:, None, None]
        cost = np.where(counts < NEVER, counts * weight, _UNREACHED)
        before, after = _shortest(cost.min(axis=0), self._most_buckets)
        allowed = self._allowed(option)
        if before[-1, -1] > allowed:
            return None
        around = (before[:-1, :-1, None] + after[-2::-1, None, 1:]).min(axis=0)  # [first, last]
        through = around + cost
        return Candidate(option, np.where(through <= allowed, counts, NEVER))

    def _room(self, option: TrainingOption) -> Floats:
        """Devices of each pool that are left to generate."""
        room = self._available.copy()
        if not self.problem.colocated:
            room[self._pools.index(option.pool)] -= option.devices
        return room

    def _reweigh(self, candidate: Candidate) -> bool:
        """Make the devices of overdrawn pools dearer; whether any pool is overdrawn on the cheapest path."""
        room = np.maximum(1.0, self._room(candidate.training))
        use = np.zeros(len(self._pools))
        for shape, first, last in cheapest_cover(candidate.engines, self.weights, self._most_buckets):
            use += self._uses[shape] * candidate.engines[shape, first, last]
        self._weights *= np.exp(np.clip(use / room - 1, -1, 1))
        self._weights /= self._weights.max()
        self._weights = np.maximum(self._weights, 1e-3)
        return bool((use > room).any())


def cheapest_cover(engines: Counts, weights: Floats, most_buckets: int) -> list[Range]:
    """Ranges (shape, first, last), at most so many, that cover all classes with the least sum of engines times weight;
    some need `NEVER` engines if there is no such cover."""
    cost = np.where(engines < NEVER, engines * weights[:, None, None], _UNREACHED)
    shapes, cheapest = cost.argmin(axis=0), cost.min(axis=0)
    before, _ = _shortest(cheapest, most_buckets)
    cover, end, b = [], cost.shape[-1], most_buckets
    while end > 0:
        first = int((before[b - 1, :end] + cheapest[:end, end - 1]).argmin())
        cover.append((int(shapes[first, end - 1]), first, end - 1))
        end, b = first, max(1, b - 1)
    return cover[::-1]


def _shortest(cost: Floats, most_buckets: int) -> tuple[Floats, Floats]:
    """[buckets, class] least cost to cover the classes before each one, and from each one on, with at most so many
    buckets; `cost` is [first, last]."""
    classes = cost.shape[0]
    edges = np.full((classes + 1, classes + 1), _UNREACHED)  # [from boundary, to boundary]
    edges[:-1, 1:] = cost
    before, after = np.full((2, most_buckets + 1, classes + 1), _UNREACHED)
    before[0, 0] = after[0, classes] = 0.0
    for b in range(1, most_buckets + 1):
        before[b] = np.minimum(before[b - 1], (before[b - 1][:, None] + edges).min(axis=0))
        after[b] = np.minimum(after[b - 1], (edges + after[b - 1][None, :]).min(axis=1))
    return before, after
