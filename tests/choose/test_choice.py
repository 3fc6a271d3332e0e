"""A plan that is simulated before it is promised, for a small cluster and a log of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from oracles.small_cluster import CLUSTER, QWEN_06B, RECIPE, trajectories

from libra.choose.candidates import MOST, ONE_SIZE, candidates
from libra.choose.choice import ChoiceProgress, choose_plan
from libra.choose.effort import Effort
from libra.choose.recall import halves, measured_recall, shrunk
from libra.choose.rehearsal import Rehearsals
from libra.plan.allocation import Allocation, Bucket
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.price import infeasibility, price, solution
from libra.plan.plan import Plan, answer, dump_plan, make_plan, parse_plan
from libra.plan.planner import Planner
from libra.plan.problem import Problem
from libra.plan.solution import Solution
from libra.report.plan_headline import finalist_rows, headline
from libra.route.catalogue import policy_named
from libra.sim.of_plan import simulate_run
from libra.trajectory import Trajectory


@cache
def log() -> tuple[Trajectory, ...]:
    """Trajectories of few and of many tool calls, of which the prompt says nothing."""
    return (*trajectories(0, 2, 48), *(replace(it, policy_version=0) for it in trajectories(1, 20, 16)))


def request(**changes: Any) -> ClusterRequest:
    planner = Planner(CLUSTER, QWEN_06B, RECIPE.model_copy(update=changes))
    tracker = planner.tracker(log())
    return planner.request(tracker)


@cache
def chosen(router: str, jobs: int = 1) -> Plan:
    return choose_plan(request(router=router), log(), effort=Effort(jobs=jobs))


@pytest.mark.parametrize("mode", ["async", "sync", "colocated"])
def test_candidates_are_different_plans_of_the_menu_and_the_first_has_one_size(mode: str) -> None:
    asked = request(mode=mode, staleness=1 if mode == "async" else 0)
    menu = asked.menu()
    best = solve(menu.problem)
    found = candidates(menu, best, solve)
    assert 2 <= len(found) <= MOST
    assert found[0].kind == ONE_SIZE and len(found[0].solution.allocation.buckets) == 1
    assert best.allocation in [it.solution.allocation for it in found]
    assert len({it.solution.allocation for it in found}) == len(found)
    for it in found:
        assert infeasibility(menu.problem, it.solution.allocation) is None
        assert it.solution.predicted == price(menu.problem, it.solution.allocation)
        assert it.solution.proof.bound <= best.predicted.step <= it.solution.predicted.step * (1 + 1e-3)
    single = solve(replace(menu.problem, most_buckets=1), tie_break=False)
    assert found[0].solution.predicted.step == pytest.approx(single.predicted.step, rel=1e-3)


@pytest.mark.parametrize("router", ["cmlfq", "least-loaded"])
def test_what_is_promised_was_simulated(router: str) -> None:
    plan = chosen(router)
    assert plan.simulated is not None and plan.step == plan.simulated.seconds
    assert plan.finalists[0].allocation == plan.allocation
    assert plan.finalists[0].simulated == plan.simulated
    steps = 4 + plan.simulated.steps
    run = simulate_run(plan, log(), steps, router, learned=log())
    assert run.settled_step_seconds(4) == pytest.approx(plan.simulated.seconds, rel=1e-9)
    for finalist in plan.finalists[1:]:
        assert finalist.simulated is not None and finalist.slower is not None
    assert plan.cut_short is None and not any("cut short" in it for it in headline(plan))
    assert parse_plan(dump_plan(plan)) == plan


def test_a_router_that_ignores_buckets_gets_one_engine_size() -> None:
    plan = chosen("least-loaded")
    assert all(len(finalist.allocation.buckets) == 1 for finalist in plan.finalists)
    assert plan.request.kind == "cluster" and plan.request.recall == ()


def test_processes_give_the_same_bytes_and_say_how_far_they_are() -> None:
    told: list[ChoiceProgress] = []
    plan = choose_plan(request(router="cmlfq"), log(), effort=Effort(jobs=3), tell=told.append)
    assert dump_plan(plan) == dump_plan(chosen("cmlfq"))
    assert told[0].words == "solving"
    assert max(moment.done for moment in told) == len(plan.finalists)


def test_without_time_two_plans_are_simulated_and_it_says_which_were_not() -> None:
    plan = choose_plan(request(), log(), effort=Effort(seconds=0.0))
    assert ONE_SIZE in [finalist.kind for finalist in plan.finalists[:2]]
    unseen = [finalist.simulated is None for finalist in plan.finalists]
    assert unseen == [False, False] + [True] * (len(unseen) - 2)
    assert plan.simulated is not None and plan.simulated.steps == 6 and plan.simulated.error is not None
    assert plan.cut_short == 0 and parse_plan(dump_plan(plan)) == plan
    said = " ".join(headline(plan))
    assert "cut short at 0" in said and "steps of the finalists: 6, 2, 0" in said
    rows = finalist_rows(plan)
    assert rows[1][-1].endswith(" (2 steps: no interval)"), rows
    assert {row[-1] for row in rows[2:]} == {"not simulated"}


def test_a_solver_is_asked_for_every_candidate() -> None:
    asked: list[Problem] = []

    def solved(problem: Problem) -> Solution:
        asked.append(problem)
        return solve(problem)

    plan = choose_plan(request(), log(), effort=Effort(seconds=0.0), solved=solved)
    assert len(asked) >= len(plan.finalists)


def test_a_run_that_pauses_goes_on_as_if_it_had_not() -> None:
    plan = make_plan(request())
    policy = policy_named("cmlfq")
    with Rehearsals([plan], log(), policy) as paused, Rehearsals([plan], log(), policy) as other:
        first = dict(paused.upto({0: 1}))
        assert dict(paused.upto({0: 3})) == dict(other.upto({0: 3}))
        assert dict(other.upto({0: 3}))[0][:1] == first[0]


def test_answers_that_were_not_waited_for_are_no_answers_to_later_questions() -> None:
    plan = make_plan(request())
    policy = policy_named("cmlfq")
    with Rehearsals([plan, plan], log(), policy, jobs=2) as runs, Rehearsals([plan], log(), policy) as other:
        answers = runs.upto({0: 1, 1: 3})
        next(answers)
        answers.close()  # as a race does whose time is up
        for samples in (1, 2, 4):
            assert dict(runs.upto({1: samples}))[1] == dict(other.upto({0: samples}))[0]


def test_an_error_in_a_process_is_the_callers() -> None:
    plan = make_plan(request())
    long = replace(log()[0], prompt_tokens=30_000)
    with (
        Rehearsals([plan, plan], (long,), policy_named("cmlfq"), jobs=2) as runs,
        pytest.raises(ValueError, match="30"),
    ):
        list(runs.upto({0: 1, 1: 1}))


def test_halves_share_no_prompt_and_lose_nothing() -> None:
    one, other = halves(log())
    assert {it.prompt_id for it in one}.isdisjoint(it.prompt_id for it in other)
    assert sorted(it.id for it in (*one, *other)) == sorted(it.id for it in log())
    alike = [replace(it, prompt_id="p") for it in log()]
    assert [len(half) for half in halves(alike)] == [len(log()) // 2] * 2


def test_recall_counts_what_a_router_leaves_in_a_bucket_that_is_too_short() -> None:
    asked = request(max_buckets=2)
    menu = asked.menu()
    limit = next(peak for peak in menu.problem.peaks if peak > 2_000)
    buckets = (Bucket("a800/tp1", 2, 0, limit), Bucket("a800/tp2", 2, limit, RECIPE.max_length))
    option = min(menu.problem.training, key=lambda it: it.devices)
    split = Allocation(option.replicas, buckets, option.layout)
    plan = answer(asked, menu, solution(menu.problem, split))
    # It learns nothing, and demotes what outgrows its bucket: all before that was generated in the short one.
    recall = measured_recall(plan, asked.classes, log(), policy_named("mlfq"))
    inside = [hit for hit, cls in zip(recall, asked.classes, strict=True) if cls.peak_context <= limit]
    beyond = [hit for hit, cls in zip(recall, asked.classes, strict=True) if cls.peak_context > limit]
    assert 0 < min(beyond) <= max(beyond) < 1 and max(beyond) < max(inside) < 1
    assert measured_recall(plan, asked.classes, log()[:1], policy_named("cmlfq")) == ()


def test_few_trajectories_are_no_proof_of_a_good_router() -> None:
    tokens = np.array([100.0, 100.0, 0.0])
    assert shrunk(np.array([0.0, 0.0, 0.0]), np.zeros(3), np.ones(3)) == (1.0, 1.0, 1.0)
    few, many, none = shrunk(np.array([100.0, 50.0, 0.0]), tokens, np.array([2.0, 1000.0, 5.0]))
    assert none == 0.5 and few == pytest.approx((2 + 8 * 0.5) / 10) and many == pytest.approx(0.5)
    more, _, _ = shrunk(np.array([100.0, 50.0, 0.0]), tokens, np.array([200.0, 1000.0, 5.0]))
    assert few < more < 1
