"""The allocation problem for a step of given length, as an integer linear program.

It is an independent check of `libra.plan.model.cpsat`: both use `need`, but share no model, bound or search. PuLP
writes the program, and CBC solves it. Notation and names of constraints are those of `libra.plan.problem`.

Each candidate has its own path, along which its x[c] flows from the first class to the end of the last. So no
constraint has to be switched off for other candidates, and there is no large constant. All coefficients are devices or
engines, and the linear relaxation is tight.

A candidate c is a training option that keeps the step, with a shape for the first range, and possible routers. A
candidate with known routers has only the ranges of the running buckets (`keep_buckets`).

Invariant: every answer is priced by `libra.plan.options.price` before it counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pulp
from pulp.apis import coin_api

from libra.plan.allocation import Allocation
from libra.plan.model.feasibility import all_devices_conflict, ample_step, require_feasible
from libra.plan.model.ranges import NEVER, Counts, Range, RangeTable, make_allocation, most_buckets, present_ranges
from libra.plan.model.solve import ROUNDING, SHORTEST, STEP_TOLERANCE, what_runs
from libra.plan.options.price import infeasibility, price, solution
from libra.plan.problem import Problem, TrainingOption
from libra.plan.solution import Solution
from libra.plan.transition import joins


def solve_ilp(problem: Problem, *, tolerance: float = 1e-4, tie_break: bool = True) -> Solution:
    """Find the best allocation. Before the tie-break, its step is at most `tolerance` (relative) longer than the
    shortest.

    Raises `InfeasiblePlanError` when no allocation can serve the problem, and RuntimeError if CBC's answer is invalid.
    """
    require_feasible(problem)
    ample = max(SHORTEST, ample_step(problem))
    trial = max(SHORTEST, min(option.seconds for option in problem.training))
    allocation, disproven = keeps_step(problem, trial), 0.0
    while allocation is None:
        if trial == ample:
            raise all_devices_conflict(problem)
        disproven, trial = trial, min(2 * trial, ample)
        allocation = keeps_step(problem, trial)
    step = price(problem, allocation).step
    while step > max(SHORTEST, disproven * (1 + tolerance)):
        trial = min(math.sqrt(max(disproven, step / 4) * step), step / (1 + tolerance / 2))
        better = keeps_step(problem, trial)
        if better is None:
            disproven = trial
        else:
            allocation, step = better, price(problem, better).step
    if tie_break:
        longest = max(SHORTEST, step * (1 + STEP_TOLERANCE))
        allocation = what_runs(problem, longest) or StepProgram(problem, longest).simplest() or allocation
    return solution(problem, allocation, disproven, "optimal")


def keeps_step(problem: Problem, step: float) -> Allocation | None:
    """An allocation with a price of at most `step` seconds (> 0); None if there is none."""
    return StepProgram(problem, step).solve()


class _Candidate(NamedTuple):
    training: TrainingOption
    need: Counts  # [shape, first, last]
    ranges: Sequence[Range]
    keeps: bool  # the present buckets


class StepProgram:
    """The variables and constraints for one length of the step. Read `__init__` as the mathematical model."""

    def __init__(self, problem: Problem, step: float) -> None:
        self.problem, self.step = problem, step

        # Sets and data
        self.uses = [problem.uses(shape) for shape in problem.shapes]
        self.shapes = range(len(problem.shapes))
        self.candidates = self._candidates()

        # Variables
        self.lp = pulp.LpProblem("libra", pulp.LpMinimize)
        self.x = [self._integer(f"x_{c}") for c in range(len(self.candidates))]
        self.z = [
            {r: self._integer(f"z_{c}_{r[0]}_{r[1]}_{r[2]}") for r in candidate.ranges}
            for c, candidate in enumerate(self.candidates)
        ]
        self.idle = problem.use_all_devices  # then `spare` engines fill the devices that needed engines leave
        self.spare = [
            [self._integer(f"spare_{c}_{s}", self._most(s)) for s in self.shapes] if self.idle else []
            for c in range(len(self.candidates))
        ]

        # Constraints
        self.one_training()
        self.every_class_once()
        self.most_buckets()
        self.one_bucket_per_shape()
        self.no_stray_engines()
        self.devices()

    def one_training(self) -> None:
        """sum over c of x[c] = 1"""
        self._add("one_training", pulp.lpSum(self.x) == 1)

    def every_class_once(self) -> None:
        """z[c] is a path with flow x[c], which enters at the first class, leaves each class again, and ends after the
        last.
        """
        classes = len(self.problem.peaks)
        for c, (x, z) in enumerate(zip(self.x, self.z, strict=True)):
            ending: list[list[Any]] = [[] for _ in range(classes + 1)]
            starting: list[list[Any]] = [[] for _ in range(classes + 1)]
            for (_, first, last), variable in z.items():
                starting[first].append(variable)
                ending[last + 1].append(variable)
            for j in range(classes + 1):
                entering = x if j == 0 else pulp.lpSum(ending[j])
                leaving = x if j == classes else pulp.lpSum(starting[j])
                self._add(f"every_class_once_{c}_{j}", entering == leaving)

    def most_buckets(self) -> None:
        """sum over s, i, j of z[c, s, i, j] <= most_buckets * x[c]"""
        if self.problem.most_buckets is not None:
            most = most_buckets(self.problem)
            for c, (x, z) in enumerate(zip(self.x, self.z, strict=True)):
                self._add(f"most_buckets_{c}", pulp.lpSum(z.values()) <= most * x)

    def one_bucket_per_shape(self) -> None:
        """sum over i, j of z[c, s, i, j] <= x[c]"""
        if self.problem.one_bucket_per_shape:
            for c, x in enumerate(self.x):
                for s in self.shapes:
                    self._add(f"one_bucket_per_shape_{c}_{s}", pulp.lpSum(self._ranges_of(c, s)) <= x)

    def no_stray_engines(self) -> None:
        """spare[c, s] <= most[s] * sum over i, j of z[c, s, i, j]"""
        for c, spare in enumerate(self.spare):
            for s, engines in enumerate(spare):
                self._add(f"no_stray_engines_{c}_{s}", engines <= self._most(s) * pulp.lpSum(self._ranges_of(c, s)))

    def devices(self) -> None:
        """For each pool p, sum over s in p of devices[s] * n[c, s] <= (devices[p] - training[c, p]) * x[c], where n is
        need[c] z[c] + spare. Colocated, training is not subtracted.

        With use_all_devices, <= becomes =; colocated, unless training uses the whole pool. A serving pool then lends
        all its devices or none.
        """
        for c, (candidate, x) in enumerate(zip(self.candidates, self.x, strict=True)):
            for pool in self.problem.pools:
                generating = pulp.lpSum(
                    self.uses[s][pool.name] * n for s, n in self._engines(c) if pool.name in self.uses[s]
                )
                trains = candidate.training.devices if candidate.training.pool == pool.name else 0
                room = pool.devices if self.problem.colocated else pool.devices - trains
                full = self.problem.use_all_devices and not (self.problem.colocated and trains == pool.devices)
                name = f"devices_{c}_{pool.name}"
                if full and pool.serves:
                    lends = self._integer(f"lends_{c}_{pool.name}")
                    self._add(f"{name}_lends", lends <= x)
                    self._add(name, generating == room * lends)
                else:
                    self._add(name, generating == room * x if full else generating <= room * x)

    def solve(self) -> Allocation | None:
        """Any allocation that satisfies the constraints; None if there is none."""
        return self._allocation() if self._optimal() else None

    def simplest(self) -> Allocation | None:
        """The allocation with the fewest moves, then devices, then buckets, found in three solves."""
        fewest = {"devices": self._devices(), "buckets": self._buckets()}
        if self.problem.current is not None:
            fewest = {"moves": self._moves(self.problem.current), **fewest}
        for name, objective in fewest.items():
            self.lp.setObjective(objective)
            if not self._optimal():
                return None
            self._add(f"fewest_{name}", objective <= round(pulp.value(objective)))
        return self._allocation()

    def _candidates(self) -> list[_Candidate]:
        present = present_ranges(self.problem)
        possible = RangeTable(self.problem, tried=False)
        known = None if present is None else RangeTable(self.problem, tried=True)
        found = []
        for option in self.problem.training:
            if option.seconds > self.step or option.devices > self.problem.pool(option.pool).devices:
                continue
            room = self._room(option)[:, None, None]
            for begin in self.shapes:
                need = possible.engines(option, self.step, begin)
                fitting = np.argwhere(need <= room)
                found.append(_Candidate(option, need, [(int(s), int(i), int(j)) for s, i, j in fitting], keeps=False))
            if known is not None and present is not None:
                kept = known.engines(option, self.step, present[0][0])
                if all(kept[r] < NEVER for r in present):
                    found.append(_Candidate(option, kept, present, keeps=True))
        return found

    def _room(self, option: TrainingOption) -> Any:
        """[shape] number of engines for which the option leaves devices."""
        room = {pool.name: pool.devices for pool in self.problem.pools}
        if not self.problem.colocated:
            room[option.pool] -= option.devices
        return np.array([min(room[pool] // devices for pool, devices in uses.items()) for uses in self.uses])

    def _optimal(self) -> bool:
        if not self.candidates:
            return False
        status = self.lp.solve(pulp.COIN_CMD(path=coin_api.pulp_cbc_path, msg=False, threads=1))
        if status in (pulp.LpStatusOptimal, pulp.LpStatusInfeasible):
            return bool(status == pulp.LpStatusOptimal)
        raise RuntimeError(f"CBC stopped with status {pulp.LpStatus[status]!r}; report it with the problem")

    def _allocation(self) -> Allocation:
        """The priced solution; raises RuntimeError if it does not keep the step."""
        c = next(c for c, x in enumerate(self.x) if _is_one(x))
        candidate = self.candidates[c]
        cover = sorted((r for r, z in self.z[c].items() if _is_one(z)), key=lambda r: r[1])
        spare = [round(engines.value() or 0.0) for engines in self.spare[c]]
        allocation = make_allocation(self.problem, candidate.training, cover, candidate.need, spare, candidate.keeps)
        reason = infeasibility(self.problem, allocation)
        if reason is None and price(self.problem, allocation).step > self.step * (1 + ROUNDING):
            reason = f"its step is {price(self.problem, allocation).step:.6g} s"
        if reason is not None:
            raise RuntimeError(f"CBC was asked for a step of {self.step:.6g} s and gave {allocation}: {reason}")
        return allocation

    def _moves(self, current: Allocation) -> Any:
        """Number of engines and replicas to start, plus 1 if the buckets change."""
        starts = []
        for s, shape in enumerate(self.problem.shapes):
            start = self._integer(f"start_{s}", self._most(s))
            engines = pulp.lpSum(n for c in range(len(self.x)) for shape_of, n in self._engines(c) if shape_of == s)
            self._add(f"starts_{s}", start >= engines - current.engines_by_shape[shape])
            starts.append(start)
        return pulp.lpSum(starts) + pulp.lpSum(
            (joins(current, candidate.training) + (not candidate.keeps)) * x
            for candidate, x in zip(self.candidates, self.x, strict=True)
        )

    def _devices(self) -> Any:
        engines = (pair for c in range(len(self.x)) for pair in self._engines(c))
        return pulp.lpSum(sum(self.uses[s].values()) * n for s, n in engines) + pulp.lpSum(
            candidate.training.devices * x for candidate, x in zip(self.candidates, self.x, strict=True)
        )

    def _buckets(self) -> Any:
        return pulp.lpSum(variable for z in self.z for variable in z.values())

    def _engines(self, c: int) -> list[tuple[int, Any]]:
        """Pairs of a shape and a number of its engines, to be summed."""
        need = self.candidates[c].need
        return [(r[0], int(need[r]) * z) for r, z in self.z[c].items()] + list(enumerate(self.spare[c]))

    def _ranges_of(self, c: int, shape: int) -> list[Any]:
        return [z for r, z in self.z[c].items() if r[0] == shape]

    def _most(self, s: int) -> int:
        return min(self.problem.pool(pool).devices // devices for pool, devices in self.uses[s].items())

    def _integer(self, name: str, most: int = 1) -> Any:
        return self.lp.add_variable(name, 0, most, pulp.LpInteger)

    def _add(self, name: str, constraint: Any) -> None:
        """Add a constraint. PuLP accepts no constraint without a variable, such as 0 <= 0 for a class that no candidate
        serves. A variable is added to such a constraint.
        """
        if isinstance(constraint, bool):
            constraint = self.x[0] >= (0 if constraint else 2)
        self.lp += constraint, name


def _is_one(variable: Any) -> bool:
    return bool((variable.value() or 0.0) > 0.5)
