"""Two formulations and brute force agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from oracles.enumerate_problems import optimum, problems
from oracles.optimality import require_agreement
from oracles.small_problem import LONG, PROBLEM, two_buckets

from libra.plan.model.ilp import keeps_step, solve_milp
from libra.plan.problem import InfeasiblePlanError, Pool, Problem


@settings(max_examples=300, deadline=None)
@given(problems())
def test_both_formulations_and_brute_force_agree(problem: Problem) -> None:
    require_agreement(problem)


@settings(max_examples=15, deadline=None)
@given(problems())
def test_bisection_ends_within_its_tolerance(problem: Problem) -> None:
    solution = solve_milp(problem, tolerance=1e-2)
    best = optimum(problem)
    assert solution.proof.bound <= best * (1 + 1e-6)
    assert best * (1 - 1e-6) <= solution.predicted.step <= max(best * (1 + 1e-2), 1e-6)


def test_a_known_plan() -> None:
    """The three short engines with 8 seats have 6.5 s of work, the longest class takes (10 + 4 + 1) / 2 s."""
    solution = solve_milp(PROBLEM)
    assert solution.allocation.replicas == 2
    assert solution.predicted.step == 7.5
    assert 7.5 * (1 - 2e-4) <= solution.proof.bound <= 7.5


def test_known_routers_make_the_present_ranges_better() -> None:
    long = replace(LONG, work=((50.0, 10.0),))
    problem = replace(PROBLEM, pools=(Pool("a", 1, 4),), engines=(*PROBLEM.engines[:2], long))
    assert keeps_step(problem, 18.4) is None
    assert keeps_step(replace(problem, current=two_buckets(1, 1, 1)), 12.6) == two_buckets(1, 1, 1)


def test_a_problem_without_a_plan_is_refused() -> None:
    """Eight devices, of which training takes one and every long engine two."""
    odd = replace(PROBLEM, engines=(LONG,), training=PROBLEM.training[:1], use_all_devices=True)
    with pytest.raises(InfeasiblePlanError, match="use_all_devices leaves no plan"):
        solve_milp(odd)
