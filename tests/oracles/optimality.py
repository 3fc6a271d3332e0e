"""Checks of the solvers' answers by brute force.

Invariant: an answer passes only if its step is within the solver's tolerance of the shortest step of all allocations,
its bound holds, and no allocation that is as good is simpler. Otherwise an AssertionError is raised.
"""

from __future__ import annotations

import pytest

from libra.plan.model.ilp import keeps_step
from libra.plan.model.solve import STEP_TOLERANCE, solve
from libra.plan.options.price import price
from libra.plan.problem import Problem
from libra.plan.solution import Solution
from oracles.enumerate_problems import Priced, answers, priced

INDISTINCT = 1e-6  # seconds: steps that differ by less count as equal
PROVEN = 1e-4  # relative distance of bound and step


def require_best(solution: Solution, plans: list[Priced]) -> None:
    """`plans` are all `answers` to the solution's problem."""
    shortest = min(plan.step for plan in plans)
    chosen = next(plan for plan in plans if plan.allocation == solution.allocation)
    step, bound = solution.predicted.step, solution.proof.bound
    assert solution.proof.status == "optimal"
    assert step == pytest.approx(chosen.step, rel=1e-9)
    assert bound <= shortest * (1 + 1e-9)
    assert shortest <= max(bound * (1 + 2 * PROVEN), INDISTINCT)
    assert step <= max(shortest * (1 + STEP_TOLERANCE + 2 * PROVEN), INDISTINCT)
    assert solution.proof.gap * step == pytest.approx(step - bound)
    limit = max(shortest * (1 + STEP_TOLERANCE) * (1 - 1e-9), INDISTINCT)
    assert simplicity(chosen) == min(
        simplicity(plan) for plan in [*plans, chosen] if plan.step <= limit or plan is chosen
    )


def simplicity(plan: Priced) -> tuple[bool, int, int, int]:
    return plan.changes, plan.moves, plan.devices, len(plan.allocation.buckets)


def require_agreement(problem: Problem) -> None:
    """Require that CP-SAT agrees with brute force, and that CBC does just above and just below the shortest step."""
    plans = priced(problem)
    require_best(solve(problem), answers(problem))
    shortest = min(plan.step for plan in plans)
    above = max(shortest * (1 + PROVEN), INDISTINCT)
    kept = keeps_step(problem, above)
    assert kept is not None
    assert price(problem, kept).step <= above * (1 + 1e-8)
    assert kept in [plan.allocation for plan in plans]
    if shortest > INDISTINCT:
        assert keeps_step(problem, shortest * (1 - PROVEN)) is None
