"""The joint allocation problem as a CP-SAT model: who trains, which engines serve which lengths, with how many devices.

Invariant: the model has no prices. For a step of a given length every price has become an integer, the fewest engines
that a shape needs for a range of classes (`libra.plan.model.ranges`), and the only question left is whether the devices
suffice. All coefficients are devices or engines, so nothing is rounded and every answer is exact.

    Data        candidates c: a training option with need[c, s, i, j], the engines of shape s for classes i..j
    Variables   x[c]        train as candidate c
                z[s, i, j]  shape s serves a bucket of classes i..j
                n[s]        engines of shape s
                keep        the buckets are those that run now
    Subject to  one_training        sum of x = 1
                every_class_once    z is a path from the first class to the end of the last
                few_buckets         sum of z <= the buckets allowed; of one shape <= 1 where a shape names its bucket
                enough_engines      n[s] >= sum of need[c, s, i, j] * z[s, i, j]   where x[c]; 0 without a bucket
                pool[p]             training and generating devices of pool p <= its devices
                different[e]        than the excluded plan e, some role has fewer devices, or trains elsewhere
    Objective   none while the shortest step is searched for; then moves, devices, buckets, in this order

Which lengths of the step are asked about is the business of `libra.plan.model.solve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from libra.plan.model.ranges import NEVER, Counts
from libra.plan.model.relaxation import Candidate
from libra.plan.options.price import training_option
from libra.plan.problem import Allocation, Bucket, Problem, TrainingOption
from libra.plan.transition import engines_by_shape, joins


class StepModel:
    """The variables and constraints for one length of the step. Read `__init__` as the paper's model."""

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        kept: Sequence[Counts | None],
        present: Sequence[tuple[int, int, int]] | None,
        excluding: Sequence[Allocation] = (),
    ) -> None:
        """`present` are the ranges of the current buckets, and `kept[c]` what candidate c needs if they are kept; None
        where they cannot be. No solution `contains` one of `excluding`."""
        self.problem, self.candidates, self._kept, self._present = problem, candidates, kept, present

        # Index sets
        least = np.minimum.reduce([c.engines for c in candidates] + [table for table in kept if table is not None])
        self.ranges = [(int(s), int(i), int(j)) for s, i, j in np.argwhere(least < NEVER)]
        self.shapes = range(len(problem.shapes))
        self.footprints = [problem.footprint(shape) for shape in problem.shapes]

        # Variables
        self.cp = cp_model.CpModel()
        self.x = [self.cp.new_bool_var(f"x[{c}]") for c in range(len(candidates))]
        self.z = {r: self.cp.new_bool_var(f"z[{r}]") for r in self.ranges}
        self.n = [self.cp.new_int_var(0, self._most_engines(s), f"n[{s}]") for s in self.shapes]
        self.keep = self.cp.new_bool_var("keep")

        # Constraints
        self._one_training()
        self._every_class_once()
        self._few_buckets()
        self._keep_means_the_present_buckets()
        self._enough_engines()
        self._none_without_a_bucket()
        self._pools()
        for excluded in excluding:
            self._different(excluded)

    def _one_training(self) -> None:
        self.cp.add_exactly_one(self.x)

    def _every_class_once(self) -> None:
        classes = len(self.problem.peaks)
        for boundary in range(classes + 1):
            ending = [z for (_, _, j), z in self.z.items() if j + 1 == boundary]
            starting = [z for (_, i, _), z in self.z.items() if i == boundary]
            if boundary == 0:
                self.cp.add_exactly_one(starting)
            elif boundary == classes:
                self.cp.add_exactly_one(ending)
            else:
                self.cp.add(cp_model.LinearExpr.sum(ending) == cp_model.LinearExpr.sum(starting))

    def _few_buckets(self) -> None:
        if self.problem.most_buckets is not None:
            self.cp.add(cp_model.LinearExpr.sum(list(self.z.values())) <= self.problem.most_buckets)
        if self.problem.one_bucket_per_shape:
            for s in self.shapes:
                self.cp.add_at_most_one(z for (t, _, _), z in self.z.items() if t == s)

    def _keep_means_the_present_buckets(self) -> None:
        if self._present is None or any(r not in self.z for r in self._present):
            self.cp.add(self.keep == 0)
            return
        for r in self._present:
            self.cp.add_implication(self.keep, self.z[r])

    def _enough_engines(self) -> None:
        for candidate, kept, x in zip(self.candidates, self._kept, self.x, strict=True):
            self._enough_for(candidate.engines, [x, ~self.keep])
            if kept is None:
                self.cp.add_implication(x, ~self.keep)
            else:
                self._enough_for(kept, [x, self.keep])

    def _none_without_a_bucket(self) -> None:
        for s in self.shapes:
            buckets = [z for r, z in self.z.items() if r[0] == s]
            self.cp.add(self.n[s] <= self._most_engines(s) * cp_model.LinearExpr.sum(buckets))

    def _enough_for(self, engines: Counts, condition: list[Any]) -> None:
        for s in self.shapes:
            needs = [(z, int(engines[r])) for r, z in self.z.items() if r[0] == s]
            possible = [(z, need) for z, need in needs if need < NEVER]
            if possible:
                need = cp_model.LinearExpr.weighted_sum([z for z, _ in possible], [count for _, count in possible])
                self.cp.add(self.n[s] >= need).only_enforce_if(condition)
            for z, count in needs:
                if count >= NEVER:
                    self.cp.add_bool_or([~z, *(~literal for literal in condition)])

    def _pools(self) -> None:
        for pool in self.problem.pools:
            here = [s for s in self.shapes if self.footprints[s][0] == pool.name]
            generating = sum(self.footprints[s][1] * self.n[s] for s in here)
            training = [
                (candidate.training.devices if candidate.training.pool == pool.name else 0, x)
                for candidate, x in zip(self.candidates, self.x, strict=True)
            ]
            if self.problem.colocated:
                self.cp.add(generating <= pool.devices)
                for devices, x in training:
                    if self.problem.use_all_devices and devices < pool.devices:
                        self.cp.add(generating == pool.devices).only_enforce_if(x)
            elif self.problem.use_all_devices:
                self.cp.add(generating + sum(devices * x for devices, x in training) == pool.devices)
            else:
                self.cp.add(generating + sum(devices * x for devices, x in training) <= pool.devices)

    def _different(self, excluded: Allocation) -> None:
        option = training_option(self.problem, excluded)
        assert option is not None  # it fits
        less = [x for c, x in zip(self.candidates, self.x, strict=True) if not _trains_alike(c.training, option)]
        for shape, engines in engines_by_shape(excluded).items():
            fewer = self.cp.new_bool_var("")
            self.cp.add(self.n[self.problem.shapes.index(shape)] < engines).only_enforce_if(fewer)
            less.append(fewer)
        self.cp.add_bool_or(less)

    # Tie-break

    def simplest(self) -> Any:
        """Moves, then devices, then buckets, then short ranges on the first shapes, as one sum."""
        buckets = sum(self.z.values())
        order = sum((s + 1) * (j - i + 1) * z for (s, i, j), z in self.z.items())
        devices = sum(self.footprints[s][1] * self.n[s] for s in self.shapes) + sum(
            candidate.training.devices * x for candidate, x in zip(self.candidates, self.x, strict=True)
        )
        classes, shapes = len(self.problem.peaks), len(self.problem.shapes)
        per_bucket = classes * shapes + 1
        per_device = per_bucket * (classes + 1)
        per_move = per_device * (sum(pool.devices for pool in self.problem.pools) * 2 + 1)
        return self._moves() * per_move + devices * per_device + buckets * per_bucket + order

    def _moves(self) -> Any:
        """How many moves lead here from what runs; 0 when nothing does."""
        current = self.problem.current
        if current is None:
            return 0
        running = engines_by_shape(current)
        starts = []
        for s, shape in enumerate(self.problem.shapes):
            start = self.cp.new_int_var(0, self._most_engines(s), f"start[{s}]")
            self.cp.add(start >= self.n[s] - running[shape])
            starts.append(start)
        joining = sum(
            joins(current, candidate.training) * x for candidate, x in zip(self.candidates, self.x, strict=True)
        )
        return joining + sum(starts) + (1 - self.keep)

    def allocation(self, solver: cp_model.CpSolver) -> Allocation:
        """The solution's allocation; engines that no bucket needs join the last bucket of their shape."""
        chosen = next(c for c, x in enumerate(self.x) if solver.boolean_value(x))
        candidate = self.candidates[chosen]
        keeps = solver.boolean_value(self.keep)
        kept = self._kept[chosen]
        engines = kept if keeps and kept is not None else candidate.engines
        cover = sorted((r for r, z in self.z.items() if solver.boolean_value(z)), key=lambda r: r[1])
        counts = [int(engines[r]) for r in cover]
        for s in self.shapes:
            last = max((k for k, r in enumerate(cover) if r[0] == s), default=None)
            spare = solver.value(self.n[s]) - sum(c for c, r in zip(counts, cover, strict=True) if r[0] == s)
            if last is not None and self.problem.use_all_devices:
                counts[last] += spare
        current = self.problem.current
        ends = [bucket.up_to for bucket in current.buckets] if keeps and current is not None else None
        return make_allocation(self.problem, candidate.training, cover, counts, ends)

    def _most_engines(self, s: int) -> int:
        pool, devices, _ = self.footprints[s]
        used = any(r[0] == s for r in self.ranges)
        return self.problem.pool(pool).devices // devices if used else 0


def contains(problem: Problem, allocation: Allocation, other: Allocation) -> bool:
    """Whether an allocation is the other one with nothing less: as many engines of every shape or more, and training on
    the same pool with as many devices or more. Both fit the problem."""
    mine, others = (training_option(problem, a) for a in (allocation, other))
    assert mine is not None and others is not None
    return _trains_alike(mine, others) and engines_by_shape(allocation) >= engines_by_shape(other)


def _trains_alike(option: TrainingOption, other: TrainingOption) -> bool:
    """On the same pool, with as many devices or more. Layouts are no difference: the relaxation looks at one only."""
    return option.pool == other.pool and option.devices >= other.devices


def present_ranges(problem: Problem) -> list[tuple[int, int, int]] | None:
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
    cover: Sequence[tuple[int, int, int]],
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
