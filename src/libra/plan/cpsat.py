"""The joint allocation problem as one CP-SAT model: training replicas, engines of each shape, and who serves whom.

Invariant: the model is `price` up to rounding. Time is counted in ticks and every cost is rounded down, so the
model's optimum, less one tick for the step's own rounding up, is a true lower bound; the chosen allocation is priced
again in floating point. The two differ by less than `classes + 3` ticks. A tick is a microsecond, or as much longer
as the solver's integer range demands (2 us for 4 devices, 8 classes and a step of 100 s).

    Data        B trajectories a step; D devices; classes j and shapes s, both shortest first
    Variables   x[r]     r devices train and the other D - r generate
                y[s, n]  shape s has n engines
                a[s, j]  class j is served by shape s
                work[s]  engine-ticks that one step's trajectories need of shape s
                step     ticks of one optimiser step
    Objective   lexicographic: step; then, within `STEP_TOLERANCE` of it, moves away from the current allocation;
                buckets; step again; and the first allocation in order of replicas, engines, classes

Two products are not linear. `n * step` becomes one constraint for each count n, enforced by y[s, n]. An engine's
concurrency, and with it every price, depends on how many engines there are: prices are enumerated over r and enforced
by x[r]. Both are exact.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from ortools.sat.python import cp_model

from libra.cost.rollout import residence, work_by_memory, work_by_seats
from libra.plan.moves import engines_by_shape, ranges
from libra.plan.price import capacity, own_share, possible_hits, present, price, seats, training_seconds
from libra.plan.problem import Allocation, Bucket, InfeasiblePlanError, Plan, PlanRequest, Proof

STEP_TOLERANCE = 0.005  # relative; a step longer by less is worth it when it spares a move or a bucket

_FINEST_TICK = 1e-6  # seconds

# Boolean terms of one row must not add up to more. OR-Tools 9.15 adds them in 32 bits when it presolves an enforced
# row; where they overflow it drops the enforcement and calls a feasible model infeasible.
_LARGEST_ROW = 2**31 - 1


def solve(request: PlanRequest, *, deterministic_limit: float = 10.0, seed: int = 0) -> Plan:
    """The best plan for the request. The same request, limit and seed give the same plan.

    `deterministic_limit` bounds the search in the solver's deterministic seconds, which count operations and read no
    clock; when it runs out, the best plan so far is returned with status `feasible`. Raises `InfeasiblePlanError` when
    no allocation can serve the request, RuntimeError when the limit ends before there is any plan.
    """
    require_feasible(request)
    model = AllocationModel(request)
    tie_breaks = (model.moves(), model.buckets(), model.step)
    search = _Search(model, deterministic_limit, seed)

    search.minimise(model.step)
    proven = max(0.0, (search.bound - 1) * model.tick)
    model.cp.add(model.step <= math.floor(search.value(model.step) * (1 + STEP_TOLERANCE)))
    for objective in tie_breaks:
        search.minimise(objective)
        model.cp.add(objective <= search.value(objective))
    search.first()

    allocation = model.allocation(search)
    predicted = price(request, allocation)
    bound = min(proven, predicted.step)
    gap = 1 - bound / predicted.step if predicted.step > 0 else 0.0
    return Plan(request, allocation, predicted, Proof("optimal" if search.complete else "feasible", bound, gap))


def require_feasible(request: PlanRequest) -> None:
    """Raise `InfeasiblePlanError` unless one bucket, of a shape that holds everything, can serve the request.

    If some allocation can, that one can too: the shape of its last bucket holds every class.
    """
    fleet, longest = request.fleet, request.workload.longest_context
    if fleet.core < 1:
        raise InfeasiblePlanError(
            f"fleet.core is 0, and {fleet.hybrid} hybrid and {fleet.rollout} rollout devices cannot replace it: "
            "at least one device must always train; make one of them core"
        )
    if fleet.hybrid + fleet.rollout < 1:
        raise InfeasiblePlanError(
            f"no device is left for a rollout engine: all {fleet.core} are core and always train; "
            "add a device to fleet.hybrid or fleet.rollout"
        )
    if not any(capacity(shape) >= longest for shape in request.shapes):
        shapes = ", ".join(
            f"{shape.name} (max_model_len {shape.max_model_len}, kv_tokens {shape.kv_tokens})"
            for shape in request.shapes
        )
        raise InfeasiblePlanError(
            f"no engine shape holds the longest context of {longest} tokens; there are: {shapes or 'none'}; "
            "add a shape with both that large, or lower workload.longest_context"
        )


class AllocationModel:
    """The variables and constraints of one request. Read `__init__` as the paper's model."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        fleet, workload = request.fleet, request.workload

        # Index sets
        most = min(fleet.core + fleet.hybrid, fleet.devices - 1)  # an engine at least
        self.replicas = range(fleet.core, most + 1)
        self.shapes = range(len(request.shapes))
        self.counts = range(fleet.devices - fleet.core + 1)
        self.classes = range(len(workload.classes))

        # Variables
        self.cp = cp_model.CpModel()
        longest_seconds = self._one_bucket_seconds() * (1 + STEP_TOLERANCE)
        self.tick = max(_FINEST_TICK, longest_seconds * fleet.devices * (len(self.classes) + 3) / _LARGEST_ROW)
        longest_step = self.ticks(longest_seconds) + 2
        self.most_work = fleet.devices * longest_step
        self.x = {r: self.cp.new_bool_var(f"x[{r}]") for r in self.replicas}
        self.y = {(s, n): self.cp.new_bool_var(f"y[{s},{n}]") for s in self.shapes for n in self.counts}
        self.a = {(s, j): self.cp.new_bool_var(f"a[{s},{j}]") for s in self.shapes for j in self.classes}
        self.work = [self.cp.new_int_var(0, self.most_work, f"work[{s}]") for s in self.shapes]
        self.step = self.cp.new_int_var(0, longest_step, "step")
        self.rebucket = self._rebucket()

        # Constraints
        self._every_device_has_one_role()
        self._every_class_has_one_shape_that_holds_it()
        self._buckets_are_contiguous()
        self._the_last_bucket_holds_the_longest_context()
        self._engines_run_exactly_where_classes_are()
        self._work_by_seats_and_by_memory()
        self._engines_have_time_for_their_work()
        self._trainers_have_time()
        self._staleness_has_time_for_the_longest()

    # Families of constraints

    def _every_device_has_one_role(self) -> None:
        self.cp.add_exactly_one(self.x.values())
        for s in self.shapes:
            self.cp.add_exactly_one(self.y[s, n] for n in self.counts)
        training = sum(r * self.x[r] for r in self.replicas)
        generating = sum(n * self.y[s, n] for s in self.shapes for n in self.counts)
        self.cp.add(training + generating == self.request.fleet.devices)

    def _every_class_has_one_shape_that_holds_it(self) -> None:
        for j in self.classes:
            self.cp.add_exactly_one(self.a[s, j] for s in self.shapes)
            for s in self.shapes:
                if self.request.workload.classes[j].peak_context > capacity(self.request.shapes[s]):
                    self.cp.add(self.a[s, j] == 0)

    def _buckets_are_contiguous(self) -> None:
        """If a class is served by one of the first shapes, so are all shorter classes, and its equals in length."""
        peaks = [cls.peak_context for cls in self.request.workload.classes]
        for j in self.classes[1:]:
            for s in self.shapes:
                shorter = sum(self.a[t, j - 1] for t in range(s + 1))
                longer = sum(self.a[t, j] for t in range(s + 1))
                self.cp.add(shorter == longer if peaks[j - 1] == peaks[j] else shorter >= longer)

    def _the_last_bucket_holds_the_longest_context(self) -> None:
        for s in self.shapes:
            if capacity(self.request.shapes[s]) < self.request.workload.longest_context:
                self.cp.add(self.a[s, self.classes[-1]] == 0)

    def _engines_run_exactly_where_classes_are(self) -> None:
        for s in self.shapes:
            self.cp.add_bool_or(self.y[s, 0], *(self.a[s, j] for j in self.classes))
            for j in self.classes:
                self.cp.add_implication(self.a[s, j], ~self.y[s, 0])

    def _work_by_seats_and_by_memory(self) -> None:
        cost, classes = self.request.profile.engine, self.request.workload.classes
        for s in self.shapes:
            shape = self.request.shapes[s]
            by_memory = [work_by_memory(cost, cls, shape.kv_tokens) for cls in classes]
            for tried, if_tried in ((True, []), (False, [self.rebucket])):
                for hit in possible_hits(self.request, tried):
                    self.cp.add(self.work[s] >= self._load(s, by_memory, hit)).only_enforce_if(if_tried)
                    for r in self.replicas:
                        together = self._seats(s, r)
                        by_seats = [work_by_seats(cost, cls, together) for cls in classes]
                        enough = self.cp.add(self.work[s] >= self._load(s, by_seats, hit))
                        enough.only_enforce_if(self.x[r], *if_tried)

    def _engines_have_time_for_their_work(self) -> None:
        weight_load = self.ticks(self.request.profile.switch.weight_load)
        for s in self.shapes:
            for n in self.counts[1:]:
                self.cp.add(n * self.step >= self.work[s] + n * weight_load).only_enforce_if(self.y[s, n])

    def _trainers_have_time(self) -> None:
        for r in self.replicas:
            self.cp.add(self.step >= self.ticks(training_seconds(self.request, r))).only_enforce_if(self.x[r])

    def _staleness_has_time_for_the_longest(self) -> None:
        cost, workload = self.request.profile.engine, self.request.workload
        met = [j for j, is_met in zip(self.classes, present(workload), strict=True) if is_met]
        for r in self.replicas:
            training = training_seconds(self.request, r)
            for s in self.shapes:
                together = self._seats(s, r)
                for j in met:
                    latency = self.ticks(residence(cost, workload.classes[j], together) + training)
                    enough = self.cp.add((1 + workload.max_staleness) * self.step >= latency)
                    enough.only_enforce_if(self.x[r], self.a[s, j])

    # Objectives

    def moves(self) -> Any:
        """How many moves lead here from the current allocation; 0 when there is none."""
        current = self.request.current
        if current is None:
            return 0
        running = engines_by_shape(current)
        joins = sum(max(0, r - current.replicas) * self.x[r] for r in self.replicas)
        starts = sum(
            max(0, n - running[self.request.shapes[s].name]) * self.y[s, n] for s in self.shapes for n in self.counts
        )
        return joins + starts + self.rebucket

    def buckets(self) -> Any:
        return len(self.shapes) - sum(self.y[s, 0] for s in self.shapes)

    def choices(self) -> list[Any]:
        """In the order that breaks ties: few replicas, then few engines of the first shapes, then early shapes."""
        return [*self.x.values(), *self.y.values(), *(self.a[s, j] for j in self.classes for s in self.shapes)]

    def consequences(self) -> list[Any]:
        return [*self.work, self.step]

    # Results

    def allocation(self, search: _Search) -> Allocation:
        replicas = next(r for r in self.replicas if search.chosen(self.x[r]))
        engines = {s: next(n for n in self.counts if search.chosen(self.y[s, n])) for s in self.shapes}
        serving = [next(s for s in self.shapes if search.chosen(self.a[s, j])) for j in self.classes]
        buckets, above = [], 0
        for s, up_to in self._ranges(serving):
            buckets.append(Bucket(self.request.shapes[s].name, engines[s], above, up_to))
            above = up_to
        return Allocation(replicas, tuple(buckets))

    # Helpers

    def ticks(self, seconds: float) -> int:
        return math.floor(seconds / self.tick)

    def _one_bucket_seconds(self) -> float:
        """The best step with a single bucket: an upper bound on the optimum."""
        fleet, longest = self.request.fleet, self.request.workload.longest_context
        return min(
            price(self.request, Allocation(r, (Bucket(shape.name, fleet.devices - r, 0, longest),))).step
            for r in self.replicas
            for shape in self.request.shapes
            if capacity(shape) >= longest
        )

    def _seats(self, s: int, r: int) -> int:
        return seats(self.request, self.request.shapes[s], self.request.fleet.devices - r)

    def _load(self, s: int, works: list[float], router_hit: float) -> Any:
        """Ticks the classes ask of shape s, when one trajectory of class j takes `works[j]` engine seconds.

        A class's own bucket gets what the router sends there. All the rest falls on the first bucket: class 0's.
        """
        workload = self.request.workload
        starting, own = 0.0, []
        for cls, work in zip(workload.classes, works, strict=True):
            expected = workload.trajectories * cls.share * work
            reaches_own = own_share(cls, router_hit)
            starting += expected * (1 - reaches_own)
            own.append(self._bounded(self.ticks(expected * reaches_own)))
        first = self._bounded(self.ticks(starting))
        return first * self.a[s, 0] + sum(own[j] * self.a[s, j] for j in self.classes)

    def _bounded(self, ticks: int) -> int:
        """More work than fits is just more than fits: a smaller number excludes the same choices."""
        return min(ticks, self.most_work + 1)

    def _ranges(self, serving: list[int]) -> list[tuple[int, int]]:
        """Shape and longest context of each bucket, when class j is served by shape `serving[j]`."""
        peaks = [cls.peak_context for cls in self.request.workload.classes]
        ends = [(s, max(peaks[j] for j in members)) for s, members in groupby(self.classes, lambda j: serving[j])]
        return [*ends[:-1], (ends[-1][0], self.request.workload.longest_context)]

    def _rebucket(self) -> Any:
        """Whether the ranges are others than the current ones: always, when there are none or no choice of classes
        gives them again."""
        rebucket = self.cp.new_bool_var("rebucket")
        serving = self._current_shapes()
        if serving is None:
            self.cp.add(rebucket == 1)
        else:
            for j, s in zip(self.classes, serving, strict=True):
                self.cp.add_bool_or(self.a[s, j], rebucket)
        return rebucket

    def _current_shapes(self) -> list[int] | None:
        """The shape that serves each class now; None when no choice of classes gives the current ranges."""
        current = self.request.current
        if current is None:
            return None
        index = {shape.name: s for s, shape in enumerate(self.request.shapes)}
        serving = [
            next((index.get(b.shape) for b in current.buckets if b.above < cls.peak_context <= b.up_to), None)
            for cls in self.request.workload.classes
        ]
        known = [s for s in serving if s is not None]
        if len(known) < len(serving):
            return None
        same = ranges(current) == tuple((self.request.shapes[s].name, up_to) for s, up_to in self._ranges(known))
        return known if same else None


class _Search:
    """Solves one model again and again, each time from the last solution, within one deterministic budget.

    The choices are branched on in order, and what follows from them is then set to its least value. Thus no solution
    is slack: a search cannot creep down the objective tick by tick, and without an objective the first solution found
    is the first in the order of the choices.
    """

    def __init__(self, model: AllocationModel, deterministic_limit: float, seed: int) -> None:
        self._cp = model.cp
        self._cp.add_decision_strategy(model.choices(), cp_model.CHOOSE_FIRST, cp_model.SELECT_MAX_VALUE)
        self._cp.add_decision_strategy(model.consequences(), cp_model.CHOOSE_FIRST, cp_model.SELECT_MIN_VALUE)
        self._left = deterministic_limit
        self._seed = seed
        self._best: Any = None
        self.complete = True  # every search so far was finished, not cut short
        self.bound = 0.0  # proven bound on the last objective that was minimised

    def minimise(self, objective: Any) -> None:
        self._cp.minimize(objective)
        solver = self._solver()
        if self._improves(solver):
            self.bound = solver.best_objective_bound
            self._start_from_best()

    def first(self) -> None:
        """Without an objective, the first solution in the order of the choices."""
        self._cp.clear_objective()
        self._cp.clear_hints()
        solver = self._solver()
        # Presolve keeps any one of several solutions, and not the order of the variables.
        solver.parameters.cp_model_presolve = False
        solver.parameters.symmetry_level = 0
        self._improves(solver)

    def value(self, expression: Any) -> int:
        return int(self._best.value(expression))

    def chosen(self, literal: Any) -> bool:
        return bool(self._best.boolean_value(literal))

    def _solver(self) -> Any:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self._seed
        solver.parameters.search_branching = cp_model.FIXED_SEARCH
        solver.parameters.max_deterministic_time = max(0.0, self._left)
        return solver

    def _improves(self, solver: Any) -> bool:
        """Solve; if the budget ends before there is a solution, the last one stands."""
        status = solver.solve(self._cp)
        self._left -= solver.deterministic_time
        self.complete = self.complete and status == cp_model.OPTIMAL
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            self._best = solver
            return True
        if status != cp_model.UNKNOWN:
            raise RuntimeError(
                f"the solver calls a model {solver.status_name(status)} that has a solution; "
                f"report it with the request. {self._cp.validate()}"
            )
        if self._best is None:
            raise RuntimeError("no plan was found within deterministic_limit; raise it")
        return False

    def _start_from_best(self) -> None:
        self._cp.clear_hints()
        for index, value in enumerate(self._best.response_proto.solution):
            self._cp.add_hint(self._cp.get_int_var_from_proto_index(index), value)
