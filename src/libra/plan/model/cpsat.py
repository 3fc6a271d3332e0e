"""The allocation problem for a step of given length, as a CP-SAT model. Read `StepModel` from top to bottom.

Notation and names of constraints are those of `libra.plan.problem`.

Invariant: for a given step, prices become integers: `need[c, s, i, j]` engines (`libra.plan.model.ranges`). All
coefficients are numbers of devices or engines, without rounding, so every answer is exact. `libra.plan.model.solve`
chooses the step lengths to try.

A candidate c is a training option that keeps the step, with a shape for the first range. `need` is the larger table,
for possible routers. `kept` is the smaller table, for known routers; it applies if the buckets are those that run now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from libra.plan.allocation import Allocation
from libra.plan.model.ranges import NEVER, Counts, Range, make_allocation
from libra.plan.model.relaxation import Candidate
from libra.plan.options.price import training_option
from libra.plan.problem import Pool, Problem, TrainingOption
from libra.plan.transition import joins

_sum = cp_model.LinearExpr.sum
_weighted_sum = cp_model.LinearExpr.weighted_sum


class StepModel:
    """Variables and constraints for one length of the step.

    `present` has the ranges of the running buckets; None: no candidate can keep them. `kept[c]` is None if candidate c
    cannot keep them. No solution `contains` an allocation of `excluding`.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Sequence[Candidate],
        kept: Sequence[Counts | None],
        present: Sequence[Range] | None,
        excluding: Sequence[Allocation] = (),
    ) -> None:
        self.problem, self.candidates, self.kept, self.present = problem, candidates, kept, present

        # Sets
        least = np.minimum.reduce([c.engines for c in candidates] + [table for table in kept if table is not None])
        self.shapes = range(len(problem.shapes))
        self.ranges: list[Range] = [(int(s), int(i), int(j)) for s, i, j in np.argwhere(least < NEVER)]

        # Data
        self.uses = [problem.uses(shape) for shape in problem.shapes]
        used = {s for s, _, _ in self.ranges}
        self.most = [
            min(problem.pool(pool).devices // devices for pool, devices in uses.items()) if s in used else 0
            for s, uses in enumerate(self.uses)
        ]

        # Variables
        self.cp = cp_model.CpModel()
        self.x = [self.cp.new_bool_var(f"x[{c}]") for c in range(len(candidates))]
        self.z = {r: self.cp.new_bool_var(f"z[{r}]") for r in self.ranges}
        self.n = [self.cp.new_int_var(0, self.most[s], f"n[{s}]") for s in self.shapes]
        self.keep = self.cp.new_bool_var("keep")

        # Constraints
        self.one_training()
        self.every_class_once()
        self.most_buckets()
        self.one_bucket_per_shape()
        self.keep_buckets()
        self.enough_engines()
        self.no_stray_engines()
        self.devices()
        for excluded in excluding:
            self.different(excluded)

    def one_training(self) -> None:
        """sum over c of x[c] = 1"""
        self.cp.add_exactly_one(self.x).with_name("one_training")

    def every_class_once(self) -> None:
        """z is a path through the classes: one range begins with the first class, and one ends with the last. At each
        class between them, as many ranges begin as end just before it.
        """
        classes = len(self.problem.peaks)
        for j in range(classes + 1):
            ending = [z for (_, _, last), z in self.z.items() if last + 1 == j]
            starting = [z for (_, first, _), z in self.z.items() if first == j]
            if j == 0:
                constraint = self.cp.add_exactly_one(starting)
            elif j == classes:
                constraint = self.cp.add_exactly_one(ending)
            else:
                constraint = self.cp.add(_sum(ending) == _sum(starting))
            constraint.with_name(f"every_class_once[{j}]")

    def most_buckets(self) -> None:
        """sum over s, i, j of z[s, i, j] <= most_buckets"""
        if self.problem.most_buckets is not None:
            self.cp.add(_sum(list(self.z.values())) <= self.problem.most_buckets).with_name("most_buckets")

    def one_bucket_per_shape(self) -> None:
        """sum over i, j of z[s, i, j] <= 1"""
        if self.problem.one_bucket_per_shape:
            for s in self.shapes:
                self.cp.add_at_most_one(self._ranges_of(s)).with_name(f"one_bucket_per_shape[{s}]")

    def keep_buckets(self) -> None:
        """keep <= z[r] for each present range r"""
        if self.present is None or any(r not in self.z for r in self.present):
            self.cp.add(self.keep == 0).with_name("keep_buckets")
            return
        for r in self.present:
            self.cp.add_implication(self.keep, self.z[r]).with_name(f"keep_buckets[{r}]")

    def enough_engines(self) -> None:
        """n[s] >= sum over i, j of need[c, s, i, j] z[s, i, j] where x[c]; of kept[c] where x[c] and keep"""
        for candidate, kept, x in zip(self.candidates, self.kept, self.x, strict=True):
            self._enough_engines(candidate.engines, [x, ~self.keep])
            if kept is None:
                self.cp.add_implication(x, ~self.keep)
            else:
                self._enough_engines(kept, [x, self.keep])

    def _enough_engines(self, need: Counts, where: list[Any]) -> None:
        for s in self.shapes:
            engines = {r: int(need[r]) for r in self.z if r[0] == s}
            possible = [r for r, count in engines.items() if count < NEVER]
            if possible:
                needed = _weighted_sum([self.z[r] for r in possible], [engines[r] for r in possible])
                self.cp.add(self.n[s] >= needed).with_name(f"enough_engines[{s}]").only_enforce_if(where)
            for r, count in engines.items():
                if count >= NEVER:
                    self.cp.add_bool_or([~self.z[r], *(~literal for literal in where)])

    def no_stray_engines(self) -> None:
        """n[s] <= most[s] * sum over i, j of z[s, i, j]"""
        for s in self.shapes:
            self.cp.add(self.n[s] <= self.most[s] * _sum(self._ranges_of(s))).with_name(f"no_stray_engines[{s}]")

    def devices(self) -> None:
        """For each pool p, generating[p] + training[p] <= devices[p]; colocated, generating[p] <= devices[p].

        With use_all_devices, <= becomes =; colocated, unless training uses the whole pool. A serving pool then lends
        all its devices or none.
        """
        for pool in self.problem.pools:
            name = f"devices[{pool.name}]"
            generating = sum(self.uses[s][pool.name] * self.n[s] for s in self.shapes if pool.name in self.uses[s])
            if pool.serves and self.problem.use_all_devices:
                lends = self.cp.new_bool_var(f"lends[{pool.name}]")
                self.cp.add(generating == pool.devices * lends).with_name(name)
                continue
            if self.problem.colocated:
                self.cp.add(generating <= pool.devices).with_name(name)
                if self.problem.use_all_devices:
                    for candidate, x in zip(self.candidates, self.x, strict=True):
                        if _training_devices(candidate, pool) < pool.devices:
                            self.cp.add(generating == pool.devices).with_name(name).only_enforce_if(x)
                continue
            training = sum(_training_devices(c, pool) * x for c, x in zip(self.candidates, self.x, strict=True))
            if self.problem.use_all_devices:
                self.cp.add(generating + training == pool.devices).with_name(name)
            else:
                self.cp.add(generating + training <= pool.devices).with_name(name)

    def different(self, excluded: Allocation) -> None:
        """Require fewer engines of a shape than the excluded allocation has, or training on fewer devices or on another
        pool.
        """
        option = training_option(self.problem, excluded)
        assert option is not None  # the excluded allocation fits the problem
        less = [x for c, x in zip(self.candidates, self.x, strict=True) if not _trains_alike(c.training, option)]
        for shape, engines in excluded.engines_by_shape.items():
            fewer = self.cp.new_bool_var("")
            self.cp.add(self.n[self.problem.shapes.index(shape)] < engines).only_enforce_if(fewer)
            less.append(fewer)
        self.cp.add_bool_or(less).with_name("different")

    def simplest(self) -> Any:
        """The objective to minimise among plans that keep the step, as one weighted sum. In order of importance: moves,
        devices, buckets, and classes on later shapes.
        """
        buckets = sum(self.z.values())
        order = sum((s + 1) * (j - i + 1) * z for (s, i, j), z in self.z.items())
        devices = sum(sum(self.uses[s].values()) * self.n[s] for s in self.shapes) + sum(
            candidate.training.devices * x for candidate, x in zip(self.candidates, self.x, strict=True)
        )
        classes, shapes = len(self.problem.peaks), len(self.problem.shapes)
        per_bucket = classes * shapes + 1
        per_device = per_bucket * (classes + 1)
        per_move = per_device * (sum(pool.devices for pool in self.problem.pools) * 2 + 1)
        return self._moves() * per_move + devices * per_device + buckets * per_bucket + order

    def _moves(self) -> Any:
        """Number of engines and replicas to start, plus 1 if the buckets change; 0 if nothing runs."""
        current = self.problem.current
        if current is None:
            return 0
        running = current.engines_by_shape
        starts = []
        for s, shape in enumerate(self.problem.shapes):
            start = self.cp.new_int_var(0, self.most[s], f"start[{s}]")
            self.cp.add(start >= self.n[s] - running[shape])
            starts.append(start)
        joining = sum(
            joins(current, candidate.training) * x for candidate, x in zip(self.candidates, self.x, strict=True)
        )
        return joining + sum(starts) + (1 - self.keep)

    def allocation(self, solver: cp_model.CpSolver) -> Allocation:
        chosen = next(c for c, x in enumerate(self.x) if solver.boolean_value(x))
        candidate = self.candidates[chosen]
        keeps = solver.boolean_value(self.keep)
        kept = self.kept[chosen]
        need = kept if keeps and kept is not None else candidate.engines
        cover = sorted((r for r, z in self.z.items() if solver.boolean_value(z)), key=lambda r: r[1])
        spare = []
        if self.problem.use_all_devices:
            spare = [solver.value(self.n[s]) - sum(int(need[r]) for r in cover if r[0] == s) for s in self.shapes]
        return make_allocation(self.problem, candidate.training, cover, need, spare, keeps)

    def _ranges_of(self, shape: int) -> list[Any]:
        return [z for (s, _, _), z in self.z.items() if s == shape]


def contains(problem: Problem, allocation: Allocation, other: Allocation) -> bool:
    """Whether `allocation` has at least as many engines of every shape as `other`, and trains on the same pool with at
    least as many devices. Both allocations fit the problem.
    """
    mine, others = (training_option(problem, a) for a in (allocation, other))
    assert mine is not None and others is not None
    return _trains_alike(mine, others) and allocation.engines_by_shape >= other.engines_by_shape


def _trains_alike(option: TrainingOption, other: TrainingOption) -> bool:
    """Whether `option` trains on the pool of `other`, with at least as many devices. Layouts may differ, since the
    relaxation keeps only one layout per number of devices.
    """
    return option.pool == other.pool and option.devices >= other.devices


def _training_devices(candidate: Candidate, pool: Pool) -> int:
    return candidate.training.devices if candidate.training.pool == pool.name else 0
