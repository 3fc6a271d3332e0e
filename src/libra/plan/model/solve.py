"""The shortest step and the simplest plan that keeps it, with a proof.

Invariant: a longer step never needs more devices. So if no plan keeps a step of t seconds, t is a lower bound, and
bisection finds the shortest step. `libra.plan.model.relaxation` answers most queries, and excludes options and ranges
that no plan can use. `libra.plan.model.cpsat` answers the others, and breaks ties.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from ortools.sat.python import cp_model

from libra.plan.allocation import Allocation
from libra.plan.model.cpsat import StepModel, contains
from libra.plan.model.feasibility import all_devices_conflict, ample_step, require_feasible
from libra.plan.model.ranges import NEVER, Counts, Floats, RangeTable, make_allocation, most_buckets, present_ranges
from libra.plan.model.relaxation import Candidate, Relaxation, cheapest_cover
from libra.plan.options.price import infeasibility, price, solution, total_devices
from libra.plan.problem import InfeasiblePlanError, Problem
from libra.plan.solution import Solution

STEP_TOLERANCE = 3e-4  # relative; the tie-break accepts a step longer by at most this to save moves or devices
SHORTEST = 1e-6  # seconds; shorter steps are not distinguished
ROUNDING = 1e-8  # relative difference of an allocation's price from the step for which it was found

_BISECTION = 1e-4  # relative distance of proven and disproven steps at which the search ends
_SHORTCUTS = 8  # candidates that are tried before a search
# A candidate, and the engines that it needs if the present buckets are kept; None if it cannot keep them.
_Choice = tuple[Candidate, Counts | None]

_NO_TIME = "no plan was found within deterministic_limit: raise the limit"
_NO_OTHER = "all plans are excluded"


def solve(
    problem: Problem,
    *,
    deterministic_limit: float = 30.0,
    seed: int = 0,
    excluding: Sequence[Allocation] = (),
    tie_break: bool = True,
) -> Solution:
    """Find the best allocation. The same problem, limit and seed give the same answer.

    `deterministic_limit` bounds the search in the solver's deterministic seconds, which count operations and read no
    clock. If the limit runs out, the best plan found is returned with status `feasible`. Raises `InfeasiblePlanError`
    if no allocation can serve the problem, and RuntimeError if the limit runs out before any plan is found.

    No answer `contains` an allocation in `excluding`. Without `tie_break`, the answer is any allocation with the
    shortest step, which is faster to find.
    """
    require_feasible(problem)
    search = _Search(problem, deterministic_limit, seed, excluding)
    allocation, bound = search.shortest_step()
    if tie_break:
        longest = max(SHORTEST, price(problem, allocation).step * (1 + STEP_TOLERANCE))
        runs = what_runs(problem, longest)
        if runs is not None and search.is_answer(runs):
            allocation = runs
        else:
            allocation = search.simplest(longest, otherwise=allocation)
    return solution(problem, allocation, bound, "optimal" if search.complete else "feasible")


def what_runs(problem: Problem, step: float) -> Allocation | None:
    """The running allocation, if it fits and keeps the step; otherwise None. Superfluous engines stay, since stopping
    them saves no time.
    """
    current = problem.current
    if current is None or infeasibility(problem, current) is not None:
        return None
    return current if price(problem, current).step <= step else None


class _Search:
    """Solves one problem for steps of different lengths, within one deterministic budget."""

    def __init__(
        self, problem: Problem, deterministic_limit: float, seed: int, excluding: Sequence[Allocation] = ()
    ) -> None:
        self._problem, self._excluding = problem, excluding
        self._left, self._seed = deterministic_limit, seed
        self._untried = RangeTable(problem, tried=False)
        self._present = present_ranges(problem)
        self._tried = RangeTable(problem, tried=True) if self._present is not None else None
        # Known routers need no more engines than possible routers, so the bounds hold for both.
        self._relaxation = Relaxation(problem, self._tried or self._untried)
        self.complete = True  # whether the limit has cut no search short

    def shortest_step(self) -> tuple[Allocation, float]:
        """The allocation with the shortest step found, and a proven lower bound on any step."""
        disproven, trial = 0.0, max(SHORTEST, min(option.seconds for option in self._problem.training))
        found = self._within(trial)
        ample = max(trial, ample_step(self._problem))
        while found is None:
            if trial == ample:
                raise self._nothing_found()
            disproven, trial = (trial if self.complete else disproven), min(2 * trial, ample)
            found = self._within(trial)
        step = price(self._problem, found).step
        while self.complete and step > max(SHORTEST, disproven * (1 + _BISECTION)):
            trial = min(math.sqrt(max(disproven, step / 4) * step), step / (1 + _BISECTION / 2))
            better = self._within(trial)
            if better is not None:
                found, step = better, price(self._problem, better).step
            elif self.complete:
                disproven = trial
        return found, disproven

    def is_answer(self, allocation: Allocation) -> bool:
        """Whether the allocation fits, and contains no excluded allocation."""
        return infeasibility(self._problem, allocation) is None and not any(
            contains(self._problem, allocation, excluded) for excluded in self._excluding
        )

    def simplest(self, step: float, otherwise: Allocation) -> Allocation:
        """The allocation with the fewest moves, devices and buckets that keeps the step."""
        choices = self._fewest_devices(list(self._choices(step)), step, otherwise)
        return self._solve(choices, simplest=True) or otherwise

    def _within(self, step: float) -> Allocation | None:
        """Any allocation that keeps the step. None: there is none or, unless `complete`, none was found."""
        choices: list[_Choice] = []
        for choice in self._choices(step):
            choices.append(choice)
            if len(choices) <= _SHORTCUTS:
                shortcut = self._cheapest(choice[0], step, self._relaxation.weights)
                if shortcut is not None:
                    return shortcut
        return self._solve(choices)

    def _choices(self, step: float) -> Iterator[_Choice]:
        """Yield candidates, each with the engines that it needs if the present buckets are kept. Without candidates, no
        plan keeps the step.
        """
        for candidate in self._relaxation.candidates(step):
            for begin in range(len(self._problem.shapes)):
                choice = self._begun(candidate, begin, step)
                if choice is not None:
                    yield choice

    def _begun(self, candidate: Candidate, begin: int, step: float) -> _Choice | None:
        """The candidate with a first range of the shape `begin`, reduced again; None if no plan is left."""
        training, possible = candidate.training, candidate.engines < NEVER
        if not possible[begin, 0].any():
            return None
        tried = self._tried if self._present is not None and self._present[0][0] == begin else None
        engines = np.where(possible, (tried or self._untried).engines(training, step, begin), NEVER)
        left = self._relaxation.reduced(Candidate(training, engines))
        if left is None or tried is None:
            return None if left is None else (left, None)
        untried = self._untried.engines(training, step, begin)
        return Candidate(training, np.where(left.engines < NEVER, untried, NEVER)), left.engines

    def _fewest_devices(self, choices: list[_Choice], step: float, otherwise: Allocation) -> list[_Choice]:
        """Return the choices reduced to plans that may have the fewest devices; the devices of `otherwise` are an upper
        bound. Returns all choices if an allocation runs, since moves count more, or if no device may be idle.
        """
        if not choices or self._problem.current is not None or self._problem.use_all_devices:
            return choices
        candidates = [candidate for candidate, _ in choices]
        likely = sorted(candidates, key=self._relaxation.least_devices)[:_SHORTCUTS]
        found = (self._cheapest(candidate, step, self._relaxation.devices) for candidate in likely)
        known = [next((it for it in found if it is not None), otherwise), otherwise]
        most = min(total_devices(self._problem, it) for it in known)
        return [(candidate, None) for candidate in self._relaxation.with_devices(candidates, most)]

    def _nothing_found(self) -> Exception:
        if not self.complete:
            return RuntimeError(_NO_TIME)
        return InfeasiblePlanError(_NO_OTHER) if self._excluding else all_devices_conflict(self._problem)

    def _cheapest(self, candidate: Candidate, step: float, weights: Floats) -> Allocation | None:
        """The cheapest cover if it is a plan that keeps the step, otherwise None. If it is a plan, no search is
        needed.
        """
        if self._problem.use_all_devices:
            return None
        cover = cheapest_cover(candidate.engines, weights, most_buckets(self._problem))
        if any(candidate.engines[r] >= NEVER for r in cover):
            return None
        allocation = make_allocation(self._problem, candidate.training, cover, candidate.engines)
        if not self.is_answer(allocation):
            return None
        return allocation if price(self._problem, allocation).step <= step * (1 + ROUNDING) else None

    def _solve(self, choices: Sequence[_Choice], simplest: bool = False) -> Allocation | None:
        """An allocation of one of the choices; with `simplest`, the simplest allocation. None: there is none, or none
        was found.
        """
        if not choices:
            return None
        candidates, kept = zip(*choices, strict=True)
        model = StepModel(self._problem, candidates, kept, self._present, self._excluding)
        if simplest:
            model.cp.minimize(model.simplest())
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = self._seed
        solver.parameters.max_deterministic_time = max(0.0, self._left)
        # The relaxation has presolved already; more presolving takes longer than the search (`benchmarks.planning`).
        solver.parameters.max_presolve_iterations = 1
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.symmetry_level = 0
        # Otherwise the solver removes the process's handler of SIGINT, and a later Ctrl-C kills the process.
        solver.parameters.catch_sigint_signal = False
        status = solver.solve(model.cp)
        self._left -= solver.response_proto.deterministic_time
        self.complete = self.complete and status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        if status == cp_model.MODEL_INVALID:
            raise RuntimeError(f"the solver rejects the model; report it with the request. {model.cp.validate()}")
        return model.allocation(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
