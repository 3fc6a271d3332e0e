"""The solver's tie-break, determinism and limits; `test_ilp` holds it against every allocation there is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.enumerate_problems import answers, optimum, priced, problems, step_of
from oracles.optimality import require_best
from oracles.small_problem import LONG, ONE, PROBLEM, TWO, one_bucket, two_buckets
from ortools.sat.python import cp_model

from libra.plan.model.cpsat import StepModel
from libra.plan.model.solve import STEP_TOLERANCE, _Search, solve
from libra.plan.options.price import price
from libra.plan.problem import Pool, Problem

SOME = settings(max_examples=60, deadline=None)


@SOME
@given(problems(), st.integers(0, 3))
def test_the_same_problem_gives_the_same_answer(problem: Problem, seed: int) -> None:
    assert repr(solve(problem, seed=seed)) == repr(solve(problem, seed=seed))


def test_ctrl_c_means_the_same_after_solving_as_before() -> None:
    code = (
        "import signal; from libra.plan.model.solve import solve\n"
        "from oracles.small_problem import PROBLEM; solve(PROBLEM)\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('interrupted')"
    )
    tests = str(Path(__file__).parents[2])
    told = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": tests}, capture_output=True)
    assert (told.returncode, told.stdout) == (0, b"interrupted\n")


CROWDED = replace(PROBLEM, use_all_devices=True, one_bucket_per_shape=True)
MIXED = replace(
    PROBLEM, pools=(Pool("a", 1, 3), Pool("b", 1, 2)), engines=(*PROBLEM.engines[:2], replace(LONG, pool="b"))
)


def test_a_known_plan() -> None:
    """Two trainers make 7.5 s of latency, one makes 9.5 s.

    Three short engines with 8 seats then have 6.5 s of work and the long one has 6 s. Two short ones have 9.5 s. Long
    engines alone need to be three, a device more: two have 8.5 s.
    """
    plan = solve(PROBLEM)
    assert plan.allocation == two_buckets(2, 3, 1)
    assert (plan.predicted.step, plan.predicted.bottleneck) == (7.5, "latency")


def test_what_runs_stays_when_nothing_is_better() -> None:
    """Its third short engine is not needed, and its cut is at no class's peak."""
    patient = replace(PROBLEM, training=(replace(ONE, seconds=20.0),))
    current = two_buckets(1, 3, 2, cut=1500)
    assert solve(patient).allocation == one_bucket(1, 1)
    assert solve(replace(patient, current=current)).allocation == current
    assert solve(replace(patient, current=current), excluding=[current]).allocation != current


@pytest.mark.parametrize("problem", [PROBLEM, CROWDED, MIXED], ids=["some idle", "none idle", "two pools"])
def test_no_running_plan_changes_unless_another_is_faster(problem: Problem) -> None:
    """Stopping what is not needed takes devices from nobody and gives them to nobody."""
    plans = priced(problem)
    for plan in plans:
        running = replace(problem, current=plan.allocation)
        step, shortest = step_of(running, plan.allocation), optimum(running)
        if step <= shortest * (1 + STEP_TOLERANCE):
            assert solve(running).allocation == plan.allocation


def test_known_routers_make_the_present_ranges_better() -> None:
    """A router that might send everything astray makes 18.5 s of work for the short engine, the known one 12.5 s."""
    long = replace(LONG, work=((50.0, 10.0),))
    problem = replace(PROBLEM, pools=(Pool("a", 1, 4),), engines=(*PROBLEM.engines[:2], long))
    untried, tried = solve(problem), solve(replace(problem, current=two_buckets(1, 1, 1)))
    assert untried.allocation == tried.allocation == two_buckets(1, 1, 1)
    assert (untried.predicted.step, tried.predicted.step) == (18.5, 12.5)


@pytest.mark.parametrize("factor", [1e-5, 1e-2, 1e3, 1e6])
def test_the_answer_does_not_depend_on_the_unit_of_time(factor: float) -> None:
    scaled = replace(
        PROBLEM,
        engines=tuple(
            replace(
                option,
                stall=option.stall * factor,
                work=tuple(tuple(x * factor for x in row) for row in option.work),
                residence=tuple(x * factor for x in option.residence),
            )
            for option in PROBLEM.engines
        ),
        training=tuple(
            replace(option, seconds=option.seconds * factor, publish=option.publish * factor)
            for option in PROBLEM.training
        ),
    )
    assert solve(scaled).allocation == solve(PROBLEM).allocation
    assert solve(scaled).predicted.step == pytest.approx(solve(PROBLEM).predicted.step * factor)


def test_a_problem_that_costs_nothing_is_still_solved_with_the_fewest_devices() -> None:
    free = tuple(replace(option, stall=0.0, work=((0.0, 0.0),), residence=(0.0, 0.0)) for option in PROBLEM.engines)
    training = (replace(TWO, seconds=0.0, publish=0.0), replace(ONE, seconds=0.0, publish=0.0))
    plan = solve(replace(PROBLEM, engines=free, training=training))
    assert plan.allocation == one_bucket(1, 1)
    assert (plan.predicted.step, plan.proof.bound, plan.proof.gap) == (0.0, 0.0, 0.0)


@SOME
@given(problems(), st.sampled_from([0.0, 1e-6, 1e-5, 1e-4]))
def test_a_search_that_is_cut_short_vouches_only_for_what_it_proved(problem: Problem, limit: float) -> None:
    try:
        plan = solve(problem, deterministic_limit=limit)
    except RuntimeError as error:
        assert "raise the limit" in str(error)
        return
    best = min(answer.step for answer in answers(problem))
    assert plan.proof.bound <= optimum(problem) * (1 + 1e-9)
    assert plan.predicted == price(problem, plan.allocation)
    assert plan.predicted.step >= best * (1 - 1e-9)
    if plan.proof.status == "optimal":
        require_best(plan, answers(problem))


def test_a_search_without_time_says_that_its_plan_is_not_proven() -> None:
    """Covers that need no search are found all the same."""
    plan = solve(MIXED, deterministic_limit=0.0)
    assert plan.proof.status == "feasible"
    assert plan.proof.bound < optimum(MIXED) <= plan.predicted.step


@settings(max_examples=300, deadline=None)
@given(problems(), st.integers(0, 3))
def test_a_question_without_an_answer_proves_nothing(problem: Problem, answered: int) -> None:
    """Problems this small are answered in no time, so the search is told to give up after so many answers."""

    class GivesUp(_Search):
        left = answered

        def _solve(self, model: StepModel) -> cp_model.CpSolver | None:
            self.left -= 1
            if self.left >= 0:
                return super()._solve(model)
            self.complete = False
            return None

    search = GivesUp(problem, 30.0, 0)
    try:
        _, bound = search.shortest_step()
    except RuntimeError:
        assert not search.complete
        return
    assert bound <= optimum(problem) * (1 + 1e-9)


def test_a_search_without_time_for_any_plan_names_the_limit() -> None:
    with pytest.raises(RuntimeError, match="deterministic_limit: raise the limit"):
        solve(CROWDED, deterministic_limit=0.0)
