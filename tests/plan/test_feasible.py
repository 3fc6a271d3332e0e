"""A problem is refused exactly when it has no allocation, and the refusal names what conflicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from oracles.enumerate_problems import optimum, priced, problems
from oracles.small_problem import LONG, ONE, PROBLEM, SHORT_FEW, TWO

from libra.plan.model.relaxation import ample_step, require_feasible
from libra.plan.model.solve import solve
from libra.plan.problem import InfeasiblePlanError, Pool, Problem

SMALL = replace(PROBLEM, pools=(Pool("a", 1, 2),))
APART = replace(PROBLEM, pools=(Pool("a", 1, 1), Pool("b", 1, 1)), engines=(replace(LONG, pool="b"),))

IMPOSSIBLE = [
    ("no training", replace(PROBLEM, training=()), "nothing can train: there is no training option"),
    ("no engine", replace(PROBLEM, engines=()), "nothing can generate: there is no engine option"),
    ("too short", replace(PROBLEM, engines=(SHORT_FEW,)),
     r"no engine shape holds the longest context of 5000 tokens; the largest, short, holds 2000: lower the longest"),
    ("both", SMALL,
     r"training \(copies, 1 devices of a at least\) and one engine for 5000 tokens \(long, 2 devices of a\)"
     r" do not fit together: a has 2; add devices"),
    ("engine alone", APART, r"\(long, 2 devices of b\) do not fit together: a has 1, b has 1"),
    ("training alone", replace(SMALL, colocated=True, staleness=0, training=(replace(TWO, devices=3),)),
     r"training \(copies, 3 devices of a at least\).*do not fit together"),
    ("no device may idle", replace(PROBLEM, engines=(LONG,), training=(ONE,), use_all_devices=True),
     "use_all_devices leaves no plan.*allow idle devices"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "cause"), [row[1:] for row in IMPOSSIBLE], ids=[row[0] for row in IMPOSSIBLE])
def test_a_problem_that_no_allocation_can_serve_is_refused_with_the_cause(problem: Problem, cause: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=cause):
        solve(problem)


def test_colocated_training_shares_its_devices() -> None:
    """Two devices train, and the same two are one long engine."""
    plan = solve(replace(SMALL, colocated=True, staleness=0))
    assert (plan.allocation.replicas, plan.allocation.engines) == (2, 1)


@settings(max_examples=200, deadline=None)
@given(problems(feasible=False))
def test_a_problem_is_refused_exactly_when_there_is_no_allocation(problem: Problem) -> None:
    possible = bool(priced(problem))
    try:
        solve(problem)
    except InfeasiblePlanError:
        assert not possible
    else:
        assert possible
    idle = replace(problem, use_all_devices=False)
    try:
        require_feasible(idle)
    except InfeasiblePlanError:
        assert not priced(idle)
    else:
        assert priced(idle)


def test_a_plan_without_a_second_to_spare_is_found() -> None:
    """Nothing takes time but the switches, and no device may idle."""
    free = replace(LONG, stall=0.0, work=((0.0, 0.0),), residence=(0.0, 0.0))
    training = (replace(ONE, seconds=0.0, publish=0.0),)
    problem = replace(PROBLEM, engines=(free,), training=training, staleness=0, colocated=True, switch=0.5)
    assert solve(replace(problem, use_all_devices=True)).predicted.step == 1.0


@settings(max_examples=50, deadline=None)
@given(problems())
def test_an_ample_step_is_ample_for_every_allocation(problem: Problem) -> None:
    assert max(plan.step for plan in priced(problem)) <= ample_step(problem)
    assert optimum(problem) <= ample_step(problem)
