"""The integer program agrees with CP-SAT and brute force, and its answers have the price that was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from oracles.enumerate_problems import answers, moves, optimum, problems
from oracles.optimality import require_agreement, require_best
from oracles.small_problem import LONG, PROBLEM, two_buckets

from libra.plan.model.ilp import StepProgram, keeps_step, solve_ilp
from libra.plan.model.solve import solve
from libra.plan.options.price import price
from libra.plan.problem import EngineOption, InfeasiblePlanError, Pool, Problem, TrainingOption

# Formulated with continuous loads, CBC took 7 engines of `many` and one of `all` for a step of 4.69 s: it lasts 4.95 s.
_NOTHING = (0.0,) * 5
NEARLY_TIED = Problem(
    pools=(Pool("a", 8, 1),),
    engines=(
        EngineOption("all", "a", 1, 1, 11, 0.25, ((7.5, 0.0, 20.0, 20.0, 2.0), (1.0, 5.0, 7.5, 20.0, 5.0)),
                     (20.0, 5.0, 7.5, 20.0, 20.0), (0.0, 0.0, 0.5, 0.0, 0.5)),
        EngineOption("all", "a", 1, 2, 11, 0.25, ((7.5, 0.0, 0.0, 0.0, 1.0), (7.5, 1.0, 1.0, 0.0, 0.5)),
                     (1.0, 2.0, 2.0, 1.0, 2.0), (0.0, 0.0, 5.0, 1.0, 3.0), generates=((2.0,) * 5,), waits=(_NOTHING,)),
        EngineOption("many", "a", 1, 1, 12, 0.0, ((2.0, 0.0, 20.0, 3.0, 7.5), (1.0, 1.0, 0.0, 3.0, 3.0)),
                     (0.0, 3.0, 0.0, 2.0, 3.0), (0.0, 0.0, 0.0, 1.0, 0.5), generates=(_NOTHING,), waits=((10.0,) * 5,)),
        EngineOption("many", "a", 1, 3, 12, 0.25, ((0.0, 0.0, 2.0, 5.0, 0.0), (1.0, 0.0, 1.0, 3.0, 5.0)),
                     (1.0, 1.0, 1.0, 1.0, 0.5), (0.0, 0.0, 0.0, 20.0, 7.5),
                     generates=((0.5,) * 5,), waits=((1.0,) * 5,)),
    ),
    training=(
        TrainingOption("copies", "a", 1, 1, seconds=2.0, publish=0.25, tail=1.0),
        TrainingOption("copies", "a", 3, 3, seconds=0.0, publish=0.25),
        TrainingOption("spread", "a", 3, 3, seconds=1.0, publish=0.25, tail=0.5),
    ),
    peaks=(2, 4, 4, 6, 9),
    expected=(False, False, True, True, True),
    longest_context=11,
    recall_known=((0.0, 0.25, 1.0, 0.25, 1.0), (0.8, 1.0, 1.0, 0.25, 0.0)),
    recall_possible=((0.0, 0.25, 1.0, 0.25, 1.0), (0.8, 1.0, 1.0, 0.25, 0.0)),
    colocated=True,
    switch=0.5,
    use_all_devices=True,
    most_buckets=2,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(problems())
def test_both_formulations_and_brute_force_agree(problem: Problem) -> None:
    require_agreement(problem)


@pytest.mark.parametrize("short", [1e-5, 0.0045, 0.0047, 0.0061, 0.05])
def test_no_answer_takes_longer_than_it_was_asked_for(short: float) -> None:
    best = optimum(NEARLY_TIED)
    assert keeps_step(NEARLY_TIED, best * (1 - short)) is None
    longer = keeps_step(NEARLY_TIED, best * (1 + short))
    assert longer is not None
    assert price(NEARLY_TIED, longer).step <= best * (1 + short)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_a_solved_problem_has_the_best_plan_and_the_simplest_of_these(problem: Problem) -> None:
    require_best(solve_ilp(problem), answers(problem))


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_what_runs_stays_with_engines_that_are_not_needed(engines: int) -> None:
    idle = tuple(replace(it, work=((0.0,) * len(it.work[0]),) * len(it.work)) for it in PROBLEM.engines)
    running = two_buckets(2, engines, 1)
    problem = replace(PROBLEM, engines=idle, training=PROBLEM.training[1:], current=running)
    assert solve_ilp(problem).allocation == running == solve(problem).allocation


def test_an_answer_with_another_price_is_an_error_and_no_plan() -> None:
    """As if one engine were enough for everything."""
    program = StepProgram(PROBLEM, 7.6)
    for candidate in program.candidates:
        candidate.need[:] = 1
    with pytest.raises(RuntimeError, match=r"asked for a step of 7\.6 s and gave"):
        program.solve()


def test_bisection_ends_within_its_tolerance() -> None:
    solution = solve_ilp(PROBLEM, tolerance=1e-2, tie_break=False)
    assert solution.proof.bound <= 7.5 <= solution.predicted.step <= 7.5 * 1.01


def test_known_routers_make_the_present_ranges_better() -> None:
    long = replace(LONG, work=((50.0, 10.0),))
    problem = replace(PROBLEM, pools=(Pool("a", 1, 4),), engines=(*PROBLEM.engines[:2], long))
    assert keeps_step(problem, 18.4) is None
    running = replace(problem, current=two_buckets(1, 1, 1))
    assert keeps_step(running, 12.6) == two_buckets(1, 1, 1)
    assert moves(running, solve_ilp(running).allocation) == 0


def test_a_problem_without_a_plan_is_refused() -> None:
    """Eight devices, of which training takes one and every long engine two."""
    odd = replace(PROBLEM, engines=(LONG,), training=PROBLEM.training[:1], use_all_devices=True)
    with pytest.raises(InfeasiblePlanError, match="use_all_devices leaves no plan"):
        solve_ilp(odd)
