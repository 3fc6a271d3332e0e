"""The planning problem as a mixed-integer linear program: a second opinion on `libra.plan.model.cpsat`.

Invariant: nothing here is shared with the first formulation but the problem and its price. Loads stay seconds, buckets
are positions in a row, classes are assigned to them, and CBC (through PuLP) decides. For a step of given length T all
constraints are linear; each is divided by T, so that tolerances of the solver mean the same for every problem.

    Data        t: training options of at most T seconds, f[t] = those after the last trajectory (all, or a tail) +
                publication (+ two switches); o: engine options; j: classes, shortest first; k: routers;
                m: rows of work; b: buckets, shortest first
    Variables   x[t]        train so
                later[b,j]  class j is served by bucket b or a later one
                y[b,o]      bucket b is served by engines of option o
                n[b,o]      how many
                m[b,o,t]    n[b,o] if training is t, else 0
                w[b,o,j]    class j is served by bucket b, which is of option o
                q[b,o]      seconds squared of re-prefill
                same        the buckets are those that run now, whose routers are known
    Subject to  one_training    sum of x = 1
                staircase       later[b,j] <= later[b,j+1] <= later[b-1,j];  equal peaks equal
                one_option      sum over o of y[b,o] = later[b, last]
                served          sum over o of w[b,o,j] = later[b,j] - later[b+1,j];  w[b,o,j] <= y[b,o]
                holds           w[b,o,j] = 0 where j is longer than o holds
                running         y[b,o] <= n[b,o] <= most engines * y[b,o];  sum over t of m[b,o,t] = n[b,o]
                filled          sum over j of fills[o,j] w[b,o,j] <= n[b,o]
                refreshed       q[b,o] >= sum over j of refresh[o,j] reach[k,j] w[b,o,j] + strays
                in_time         sum over j of work[o,m,j] reach[k,j] w[b,o,j] + strays + q[b,o] / T
                                <= sum over t of m[b,o,t] usable[o,t]
                lives           sum of residence[o,j] w[b,o,j] + sum of f[t] x[t] <= (1 + staleness) T where j is met
                devices[p,t]    sum of devices[o] m[b,o,t] <= (devices of pool p, less those of t) x[t]
    where strays are the sums of work (refresh) times 1 - reach over all classes, in the first bucket, and usable[o,t]
    is T - stall[o], and less
        generates[o] + waits[o] + f[t]                                      without staleness
        generates[o] T / ((1 + staleness) T - f[t] - waits[o])              with staleness, of batches
    The latter is 0 where generates[o] is 0, whatever it is divided by; m[b,o,t] = 0 where the divisor is below 0, where
    it is 0 and generates[o] is not, and where usable[o,t] is not above 0.
"""

from __future__ import annotations

import math
from typing import Any

import pulp
from pulp.apis import coin_api

from libra.plan.model.feasible import all_devices_conflict, ample_step, require_feasible
from libra.plan.options.price import price
from libra.plan.problem import Allocation, Bucket, EngineOption, Problem, Proof, Solution, TrainingOption

_SHORTEST = 1e-6  # seconds; steps are not told apart below it


def solve_milp(problem: Problem, *, tolerance: float = 1e-4) -> Solution:
    """An allocation whose step is at most `tolerance` (relative) longer than the shortest there is, by bisection.

    Moves and devices are not minimised. Slow: seconds for a pool of dozens of devices. Raises `InfeasiblePlanError`
    when no allocation can serve the problem.
    """
    require_feasible(problem)
    ample = max(_SHORTEST, ample_step(problem))
    allocation = keeps_step(problem, ample)
    if allocation is None:
        raise all_devices_conflict()
    disproven, step = 0.0, price(problem, allocation).step
    trial = max(_SHORTEST, min(option.seconds for option in problem.training))
    while step > max(_SHORTEST, disproven * (1 + tolerance)):
        trial = min(trial, step / (1 + tolerance / 2))
        better = keeps_step(problem, trial)
        if better is None:
            disproven = trial
        else:
            allocation, step = better, min(trial, price(problem, better).step)
        trial = max(2 * disproven, _SHORTEST) if 4 * disproven < step else math.sqrt(disproven * step)
    predicted = price(problem, allocation)
    bound = min(disproven, predicted.step)
    gap = 1 - bound / predicted.step if predicted.step > 0 else 0.0
    return Solution(allocation, predicted, Proof("optimal", bound, gap))


def keeps_step(problem: Problem, step: float) -> Allocation | None:
    """An allocation whose step is at most `step` seconds (> 0, up to the solver's 1e-6), or None: there is none."""
    return AssignmentModel(problem, step).solve()


class AssignmentModel:
    """The variables and constraints for one length of the step. Read `__init__` as the paper's model."""

    def __init__(self, problem: Problem, step: float) -> None:
        self.problem, self.step = problem, step

        # Index sets
        self.classes = range(len(problem.peaks))
        self.buckets = range(_most_buckets(problem))
        self.options = range(len(problem.engines))
        self.routers = tuple((reach, reach in problem.reach_tried) for reach in problem.reach_untried)
        self.training = [t for t in problem.training if t.seconds <= step and t.devices <= problem.pool(t.pool).devices]
        self.fixed = [_fixed_seconds(problem, option) for option in self.training]
        self.up_to = (*problem.peaks[:-1], problem.longest_context)

        # Variables
        self.lp = pulp.LpProblem("libra", pulp.LpMinimize)
        self.x = [self._binary(f"x_{t}") for t in range(len(self.training))]
        self.later = [[self._binary(f"later_{b}_{j}") for j in self.classes] for b in self.buckets]
        self.y = [[self._binary(f"y_{b}_{o}") for o in self.options] for b in self.buckets]
        self.n = [
            [self._variable(f"n_{b}_{o}", self._most_engines(o), pulp.LpInteger) for o in self.options]
            for b in self.buckets
        ]
        self.m = [
            [[self._variable(f"m_{b}_{o}_{t}", None) for t in range(len(self.x))] for o in self.options]
            for b in self.buckets
        ]
        self.w = [
            [[self._variable(f"w_{b}_{o}_{j}", 1) for j in self.classes] for o in self.options] for b in self.buckets
        ]
        self.q = [[self._variable(f"q_{b}_{o}", None) for o in self.options] for b in self.buckets]
        self.same = self._binary("same")

        # Constraints
        self._one_training()
        self._staircase()
        self._one_option()
        self._served()
        self._running()
        self._same_means_the_present_buckets()
        self._in_time()
        self._lives()
        self._devices()

    def solve(self) -> Allocation | None:
        """Some allocation that satisfies the constraints, or None: there is none."""
        if self._status([]) == pulp.LpStatusOptimal:
            return self._allocation()
        # CBC's integer preprocessing (2.10) calls one model in thousands infeasible that has a solution, and CBC
        # without it crashes on one in thousands: a no needs both, where both answer.
        try:
            status = self._status(["preprocess off"])
        except pulp.PulpSolverError:
            return None
        return self._allocation() if status == pulp.LpStatusOptimal else None

    def _status(self, options: list[str]) -> int:
        status = int(self.lp.solve(pulp.COIN_CMD(path=coin_api.pulp_cbc_path, msg=False, threads=1, options=options)))
        if status in (pulp.LpStatusOptimal, pulp.LpStatusInfeasible):
            return status
        raise RuntimeError(f"CBC stopped with status {pulp.LpStatus[status]!r}; report it with the problem")

    def _one_training(self) -> None:
        self._add(pulp.lpSum(self.x) == 1)

    def _staircase(self) -> None:
        peaks = self.problem.peaks
        for b in self.buckets:
            for j in self.classes:
                if b == 0:
                    self._add(self.later[0][j] == 1)
                elif j == 0:
                    self._add(self.later[b][0] == 0)
                else:
                    self._add(self.later[b][j] >= self.later[b][j - 1])
                    self._add(self.later[b][j] <= self.later[b - 1][j - 1])
                    if peaks[j] == peaks[j - 1]:
                        self._add(self.later[b][j] == self.later[b][j - 1])

    def _one_option(self) -> None:
        for b in self.buckets:
            self._add(pulp.lpSum(self.y[b]) == self.later[b][-1])
        if self.problem.one_bucket_per_shape:
            for shape in self.problem.shapes:
                self._add(pulp.lpSum(self.y[b][o] for b in self.buckets for o in self._options_of(shape)) <= 1)

    def _served(self) -> None:
        for b in self.buckets:
            for j in self.classes:
                self._add(pulp.lpSum(self.w[b][o][j] for o in self.options) == self._serves(b, j))
                for o in self.options:
                    holds = self.problem.engines[o].holds >= self.up_to[j]
                    self._add(self.w[b][o][j] <= (self.y[b][o] if holds else 0))

    def _serves(self, b: int, j: int) -> Any:
        """1 if class j is served by bucket b."""
        return self.later[b][j] - (self.later[b + 1][j] if b + 1 in self.buckets else 0)

    def _running(self) -> None:
        for b in self.buckets:
            for o in self.options:
                self._add(pulp.lpSum(self.m[b][o]) == self.n[b][o])
                self._add(self.n[b][o] >= self.y[b][o])
                self._add(self.n[b][o] <= self._most_engines(o) * self.y[b][o])
                filled = zip(self.problem.engines[o].fills, self.w[b][o], strict=False)
                self._add(pulp.lpSum(part * w for part, w in filled) <= self.n[b][o])

    def _same_means_the_present_buckets(self) -> None:
        present = _present(self.problem)
        if present is None or len(present) > len(self.buckets):
            self._add(self.same == 0)
            return
        for b, (shape, members) in enumerate(present):
            self._add(pulp.lpSum(self.y[b][o] for o in self._options_of(shape)) >= self.same)
            for j in members:
                self._add(self._serves(b, j) >= self.same)

    def _in_time(self) -> None:
        for b in self.buckets:
            for o, option in enumerate(self.problem.engines):
                for reach, known in self.routers:
                    # A router that is possible only for other ranges asks for nothing where the ranges stay.
                    excused = 0 if known else sum(option.refresh) / self.step**2 * self.same
                    asked = self._asked(b, o, option.refresh, reach) * (1 / self.step**2)
                    self._add(self.q[b][o] >= asked - excused)
                    for row in option.work:
                        self._row_in_time(b, o, row, reach, known)

    def _row_in_time(self, b: int, o: int, row: tuple[float, ...], reach: tuple[float, ...], known: bool) -> None:
        option = self.problem.engines[o]
        most = (sum(row) + sum(option.refresh) / self.step) / self.step
        asked = self._asked(b, o, row, reach) * (1 / self.step) + self.q[b][o] - (0 if known else most * self.same)
        given = []
        for m, fixed in zip(self.m[b][o], self.fixed, strict=True):
            usable = self._usable(option, fixed)
            if usable > 0:
                given.append(usable / self.step * m)
            else:
                self._add(m == 0)
        self._add(asked <= pulp.lpSum(given))

    def _usable(self, option: EngineOption, fixed: float) -> float:
        """Seconds of the step in which an engine can work, where `fixed` follow; not above 0 where there are none."""
        usable = self.step - option.stall
        if self.problem.staleness == 0:
            return usable - option.generates - option.waits - fixed
        if not self.problem.batched:
            return usable
        left = (1 + self.problem.staleness) * self.step - fixed - option.waits
        if option.generates == 0:
            return usable if left >= 0 else -math.inf
        return usable - option.generates * self.step / left if left > 0 else -math.inf

    def _asked(self, b: int, o: int, costs: tuple[float, ...], reach: tuple[float, ...]) -> Any:
        """What bucket b asks for if it is of option o: its classes' costs as far as they reach it, and the strays."""
        strays = sum(cost * (1 - part) for cost, part in zip(costs, reach, strict=True)) if b == 0 else 0.0
        own = pulp.lpSum(costs[j] * reach[j] * self.w[b][o][j] for j in self.classes if costs[j] * reach[j] > 0)
        return own + strays * self.y[b][o]

    def _lives(self) -> None:
        follows = pulp.lpSum(fixed / self.step * x for x, fixed in zip(self.x, self.fixed, strict=True))
        allowed = 1 + self.problem.staleness
        self._add(follows <= allowed)
        for j in self.classes:
            if self.problem.met[j]:
                stays = pulp.lpSum(
                    option.residence[j] / self.step * self.w[b][o][j]
                    for b in self.buckets
                    for o, option in enumerate(self.problem.engines)
                )
                self._add(stays + follows <= allowed)

    def _devices(self) -> None:
        problem = self.problem
        for pool in problem.pools:
            here = [(o, option.devices) for o, option in enumerate(problem.engines) if option.pool == pool.name]
            for t, (x, training) in enumerate(zip(self.x, self.training, strict=True)):
                trains = training.devices if training.pool == pool.name else 0
                room = pool.devices if problem.colocated else pool.devices - trains
                generating = pulp.lpSum(devices * self.m[b][o][t] for b in self.buckets for o, devices in here)
                self._add(generating <= room * x)
                if problem.use_all_devices and not (problem.colocated and trains == pool.devices):
                    self._add(generating >= room * x)

    def _allocation(self) -> Allocation:
        training = next(t for t, x in zip(self.training, self.x, strict=True) if _is_one(x))
        current = self.problem.current
        buckets: list[Bucket] = []
        for b in self.buckets:
            option = next((o for o in self.options if _is_one(self.y[b][o])), None)
            if option is None:
                break
            last = max(j for j in self.classes if self.w[b][option][j].value() > 0.5)
            up_to = current.buckets[b].up_to if current is not None and _is_one(self.same) else self.up_to[last]
            above = buckets[-1].up_to if buckets else 0
            engines = round(self.n[b][option].value())
            buckets.append(Bucket(self.problem.engines[option].shape, engines, above, up_to))
        return Allocation(training.replicas, tuple(buckets), training.layout)

    def _options_of(self, shape: str) -> list[int]:
        return [o for o in self.options if self.problem.engines[o].shape == shape]

    def _most_engines(self, o: int) -> int:
        option = self.problem.engines[o]
        return self.problem.pool(option.pool).devices // option.devices

    def _binary(self, name: str) -> Any:
        return self._variable(name, 1, pulp.LpInteger)

    def _variable(self, name: str, most: int | None, category: str = pulp.LpContinuous) -> Any:
        return self.lp.add_variable(name, 0, most, category)

    def _add(self, constraint: Any) -> None:
        """Constraints without a variable, such as 0 <= 0 of a class that costs nothing, are decided here."""
        if isinstance(constraint, bool):
            constraint = self.same >= (0 if constraint else 2)
        self.lp += constraint


def _fixed_seconds(problem: Problem, option: TrainingOption) -> float:
    return option.follows + option.publish + (2 * problem.switch if problem.colocated else 0.0)


def _most_buckets(problem: Problem) -> int:
    """Every bucket has a class, and classes of equal length stay together."""
    limits = [len(set(problem.peaks))]
    if problem.most_buckets is not None:
        limits.append(problem.most_buckets)
    if problem.one_bucket_per_shape:
        limits.append(len(problem.shapes))
    return min(limits)


def _present(problem: Problem) -> list[tuple[str, list[int]]] | None:
    """Shape and classes of each current bucket, or None where one of them has no class or cannot serve its range."""
    current = problem.current
    if current is None or not current.buckets or current.buckets[-1].up_to < problem.longest_context:
        return None
    found = []
    for bucket in current.buckets:
        members = [j for j, peak in enumerate(problem.peaks) if bucket.above < peak <= bucket.up_to]
        holds = [option.holds for option in problem.engines if option.shape == bucket.shape]
        if not members or not holds or bucket.up_to > holds[0]:
            return None
        found.append((bucket.shape, members))
    return found


def _is_one(variable: Any) -> bool:
    return bool(variable.value() > 0.5)
