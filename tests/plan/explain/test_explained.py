"""Explanations against every allocation there is, on small problems, and of whole plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from oracles import small_request
from oracles.enumerate_problems import priced, problems
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_06B, RECIPE
from oracles.small_problem import one_shape

from libra.hardware.cluster import override
from libra.plan.allocation import Allocation, Bucket
from libra.plan.explain.alternatives import relaxations, restrictions, splits, without_strays
from libra.plan.explain.explained import by_kind, explain, explain_plan
from libra.plan.model.solve import STEP_TOLERANCE, solve
from libra.plan.options.menu import Rejected
from libra.plan.options.price import own_training, price
from libra.plan.plan import make_plan
from libra.plan.planner import Planner
from libra.plan.problem import EngineOption, InfeasiblePlanError, Pool, Problem, TrainingOption

FEW = settings(max_examples=40, deadline=None)
CLOSE = 2 * STEP_TOLERANCE  # relative: the tie-break's and the bisection's together
MENUS = problems(small=True).map(lambda problem: replace(problem, use_all_devices=False, current=None))


def best(problem: Problem, allowed: Callable[[Allocation], bool] = lambda _: True) -> float | None:
    return min((plan.step for plan in priced(problem) if allowed(plan.allocation)), default=None)


def without(problem: Problem, shape: str) -> tuple[EngineOption, ...]:
    return tuple(option for option in problem.engines if option.shape != shape)


def is_other_with_more(problem: Problem, allocation: Allocation, other: Allocation) -> bool:
    mine, others = own_training(problem, allocation), own_training(problem, other)
    trains = mine.pool == others.pool and mine.devices >= others.devices
    return trains and allocation.engines_by_shape >= other.engines_by_shape


def is_close(found: float, wanted: float) -> bool:
    return wanted * (1 - 1e-7) - 1e-5 <= found <= wanted * (1 + CLOSE) + 1e-5


@FEW
@given(MENUS)
def test_what_is_excluded_is_not_found_again_and_the_best_of_the_rest_is(problem: Problem) -> None:
    known: list[Allocation] = []
    for _ in range(4):

        def different(allocation: Allocation) -> bool:
            return not any(is_other_with_more(problem, allocation, other) for other in known)

        wanted = best(problem, different)
        if wanted is None:
            with pytest.raises(InfeasiblePlanError, match="all plans are excluded"):
                solve(problem, excluding=known)
            return
        found = solve(problem, excluding=known)
        assert different(found.allocation)
        assert is_close(found.predicted.step, wanted)
        assert found.proof.bound <= wanted + 1e-5
        known.append(found.allocation)


@FEW
@given(MENUS)
def test_relaxed_problems_allow_every_plan_and_reliefs_are_their_optima(problem: Problem) -> None:
    solution = solve(problem)
    explained = explain(problem, solution)
    own = best(problem)
    assert own is not None
    steps = {relief.change: relief for relief in explained.reliefs}
    changes = list(relaxations(problem, {}))
    assert len(steps) == len(changes)
    for change in changes:
        wanted = best(change.problem)
        assert wanted is not None and wanted <= own + 1e-9
        relief = steps[change.what]
        assert is_close(relief.step, wanted)
        assert relief.seconds == explained.plan.predicted.step - relief.step
        if relief.binds:
            assert wanted < own
        if wanted < own * (1 - CLOSE) - 1e-4:
            assert relief.binds
    assert [relief.seconds for relief in explained.reliefs] == sorted((r.seconds for r in steps.values()), reverse=True)


@FEW
@given(MENUS)
def test_restricted_problems_forbid_the_decision_and_nothing_else(problem: Problem) -> None:
    solution = solve(problem)
    allocation, explained = solution.allocation, explain(problem, solution)
    own = (allocation.layout, allocation.replicas)
    shapes = {bucket.shape for bucket in allocation.buckets}
    forbidden: dict[str, Callable[[Allocation], bool]] = {
        "train on other devices or in another layout": lambda a: (a.layout, a.replicas) != own,
        **{f"no {shape}": lambda a, s=shape: all(b.shape != s for b in a.buckets) for shape in shapes},
        "a single bucket": lambda a: len(a.buckets) == 1,
        **{f"{most} buckets": lambda a, most=most: len(a.buckets) <= most for most in range(2, 7)},
    }
    assert [other.decision for other in explained.otherwise] == [c.what for c in restrictions(problem, allocation)]
    decisions = {other.decision: other.plan for other in explained.otherwise}
    assert ("a single bucket" in decisions) == (len(allocation.buckets) > 1)
    # What a trajectory takes after the first bucket is bounded by the fastest shape there is, so a shape goes whole.
    menus = {f"no {shape}": replace(problem, engines=without(problem, shape)) for shape in shapes}
    for decision, plan in decisions.items():
        wanted = best(menus.get(decision, problem), forbidden[decision])
        assert (plan is None) == (wanted is None)
        if plan is not None and wanted is not None:
            assert is_close(plan.predicted.step, wanted)
            if explained.plan.predicted.step > 0:
                assert plan.loss == plan.predicted.step / explained.plan.predicted.step - 1


@FEW
@given(MENUS)
def test_a_split_is_the_fastest_training_and_the_fastest_generation_beside_it(problem: Problem) -> None:
    found = {(split.pool, split.devices): split for split in splits(problem)}
    for pool, devices in {(option.pool, option.devices) for option in problem.training}:
        options = [option for option in problem.training if (option.pool, option.devices) == (pool, devices)]
        fastest = min(options, key=lambda option: option.seconds)
        alone = replace(problem, training=(fastest,))
        prices = [price(alone, plan.allocation) for plan in priced(alone)]
        assert bool(prices) == ((pool, devices) in found)
        if not prices:
            continue
        split = found[pool, devices]
        assert split.training == fastest.seconds
        assert is_close(split.step, min(p.step for p in prices))
        if problem.staleness:
            assert is_close(split.generation, min(max(p.rollout, p.latency) for p in prices))
        else:
            fixed = fastest.after_rollout + fastest.publish + 2 * problem.switch * problem.colocated
            assert split.step == pytest.approx(max(fastest.seconds, split.generation + fixed))


@FEW
@given(MENUS)
def test_an_explanation_is_json_and_prices_its_own_plan(problem: Problem) -> None:
    solution = solve(problem)
    explained = explain(problem, solution)
    json.dumps(asdict(explained), allow_nan=False)
    assert explained.plan.predicted == solution.predicted
    assert explained.bound.by == solution.predicted.bottleneck
    assert sum(seconds for _, seconds in explained.bound.parts) == pytest.approx(solution.predicted.step)
    used = sum(bucket.devices for bucket in explained.buckets)
    assert used == sum(pool.generating for pool in explained.pools)
    for pool in explained.pools:
        busy = min(pool.training, pool.generating) if problem.colocated else pool.training + pool.generating
        assert pool.idle == pool.devices - busy >= 0
    if solution.predicted.step > 0:
        worst = max(bucket.share for bucket in explained.buckets)
        assert worst == pytest.approx(
            max(solution.predicted.rollout, solution.predicted.latency) / solution.predicted.step
        )
    wanted = best(without_strays(problem))
    assert wanted is not None and is_close(explained.routing.best_plan, wanted)
    assert explained.routing.same_plan == price(without_strays(problem), solution.allocation).step


def test_a_node_or_a_version_more_is_priced_anew_where_the_problem_with_it_is_given() -> None:
    problem = one_shape((9.0, 3.0), (1.0, 1.0))
    faster = replace(problem, training=(TrainingOption("new", "p", 1, 1, 0.1, 0.0),), pools=(Pool("p", 3, 2),))
    staler = replace(problem, staleness=2, engines=(replace(problem.engines[0], work=((2.0, 1.0),)),))
    solution = solve(problem)
    given, anew = explain(problem, solution), explain(problem, solution, larger={"p": faster}, staler=staler)
    # 12 s of work on 4 engines beside 2 or on 5 beside 1 of six devices.
    nodes = [next(relief for relief in found.reliefs if relief.node_of == "p") for found in (given, anew)]
    assert [node.step for node in nodes] == pytest.approx([4.0, 2.4])
    assert nodes[0].change == "one more node of p (2 devices)"
    versions = [next(r for r in found.reliefs if r.change == "staleness 2 instead of 1") for found in (given, anew)]
    assert is_close(versions[0].step, solve(replace(problem, staleness=2)).predicted.step)
    assert is_close(versions[1].step, solve(staler).predicted.step)
    assert versions[1].step < versions[0].step


def test_without_the_longest_trajectories_nothing_waits_for_them() -> None:
    problem = one_shape((6.0, 3.0), (1.0, 6.0), stall=1.0, generates=4.0, waits=2.0)
    change = next(c for c in relaxations(problem, {}) if c.what == "no waiting for a step's longest trajectories")
    allocation = Allocation(2, (Bucket("e", 2, 0, 100),), "t")
    assert price(problem, allocation).step > 8.0
    assert price(change.problem, allocation).step == 5.5


def test_splits_are_thinned_evenly_and_keep_both_ends() -> None:
    training = tuple(TrainingOption("t", "p", n, n, 90.0 / n, 0.5) for n in range(1, 22))
    problem = one_shape((9.0, 3.0), (1.0, 1.0), training=training, pools=(Pool("p", 22, 1),))
    assert [split.devices for split in splits(problem, most=5)] == [1, 6, 11, 16, 21]
    assert [split.devices for split in splits(problem, most=21)] == list(range(1, 22))
    assert [split.devices for split in splits(problem, training[6], most=5)] == [1, 6, 7, 11, 16, 21]
    assert [split.devices for split in splits(problem, training[10], most=5)] == [1, 6, 11, 16, 21]


def test_a_lone_plan_has_no_runners_up() -> None:
    problem = one_shape((9.0, 3.0), (1.0, 1.0), pools=(Pool("p", 2, 1),))
    explained = explain(problem, solve(problem))
    assert explained.runners_up == ()
    assert {other.decision: other.plan for other in explained.otherwise}["no e"] is None


def test_a_solution_that_does_not_fit_is_refused() -> None:
    problem = one_shape((9.0, 3.0), (1.0, 1.0))
    solution = solve(problem)
    with pytest.raises(ValueError, match="no option trains"):
        explain(problem, replace(solution, allocation=replace(solution.allocation, replicas=7)))


def test_a_lower_longest_context_spares_no_work_but_the_memory_for_it() -> None:
    problem = one_shape((9.0, 3.0), (1.0, 1.0))
    small = EngineOption("small", "p", 1, 8, 10, 0.0, ((0.1, 0.1),), (0.0, 0.0), (1.0, 1.0))
    changes = {c.what: c for c in relaxations(replace(problem, engines=(*problem.engines, small)), {})}
    change = changes["longest context 10 instead of 100 tokens, for the same work"]
    assert [option.holds for option in change.problem.engines] == [100, 100]
    assert (change.problem.peaks, change.problem.longest_context) == ((10, 100), 100)


def test_reasons_of_one_kind_differ_in_numbers_and_layouts_alone() -> None:
    rejected = [
        Rejected("a", "does not fit", "at dp 24 it needs 338.3 GB; the largest item is logits"),
        Rejected("b", "does not divide", "a replica has 64 devices; there are 48"),
        Rejected("c", "does not divide", "a replica has 128 devices; there are 48"),
        Rejected("d", "slower", "slower, by 2.5 % at least, than tp1 dp* full-recompute, on 8 devices"),
    ]
    kinds = by_kind(rejected)
    assert [(kind.kind, [name for name, _ in kind.options]) for kind in kinds] == [
        ("a replica has … devices", ["b", "c"]),
        ("at dp … it needs … GB", ["a"]),
        ("slower, by … % at least, than …, on … devices", ["d"]),
    ]
    assert sorted(option for kind in kinds for option in kind.options) == [(it.name, it.reason) for it in rejected]
    problem = one_shape((9.0, 3.0), (1.0, 1.0))
    assert explain(problem, solve(problem), rejected=rejected).rejected == kinds


PLAN = Planner(CLUSTER, QWEN_06B, RECIPE).plan(CLASSES)


@pytest.mark.parametrize("mode", ["async", "sync", "colocated"])
def test_another_version_of_staleness_is_what_a_plan_with_it_would_take(mode: str) -> None:
    staleness = int(mode == "async")
    recipe = RECIPE.model_copy(update={"mode": mode, "staleness": staleness})
    later = RECIPE.model_copy(update={"mode": "async", "staleness": staleness + 1})
    planned = Planner(CLUSTER, QWEN_06B, recipe).plan(CLASSES)
    reliefs = {relief.change: relief for relief in explain_plan(planned).reliefs}
    change = f"staleness {staleness + 1} instead of {staleness}"
    if mode == "colocated":
        assert change not in reliefs
    else:
        wanted = Planner(CLUSTER, QWEN_06B, later).plan(CLASSES).predicted.step
        assert reliefs[change].step == pytest.approx(wanted, rel=1e-3)


def test_a_plan_that_does_not_answer_its_request_is_not_explained() -> None:
    (nodes,) = CLUSTER.nodes
    larger = override(CLUSTER, {nodes.name: 1000})
    for edited in (
        replace(PLAN, request=replace(PLAN.request, cluster=larger)),  # type: ignore[type-var]
        replace(PLAN, allocation=replace(PLAN.allocation, replicas=99)),
        replace(PLAN, predicted=replace(PLAN.predicted, step=PLAN.predicted.step * 0.9)),
        replace(PLAN, proof=replace(PLAN.proof, bound=PLAN.proof.bound * 2)),
    ):
        with pytest.raises(ValueError, match=r"the plan does not answer its own request: .*; plan again"):
            explain_plan(edited)


def test_the_plan_of_one_machine_is_explained_without_nodes() -> None:
    plan = make_plan(small_request.REQUEST)
    explained = explain_plan(plan)
    assert explained.plan.predicted == plan.predicted
    assert (explained.fewer_nodes, explained.smallest) == ((), None)


def test_what_fewer_nodes_cost_is_the_price_of_their_best_plan() -> None:
    explained = explain_plan(PLAN)
    (nodes,) = CLUSTER.nodes
    (fewer,) = explained.fewer_nodes
    wanted = Planner(override(CLUSTER, {nodes.name: nodes.count - 1}), QWEN_06B, RECIPE).plan(CLASSES).predicted.step
    assert fewer.nodes == ((nodes.name, nodes.count - 1, nodes.count),)
    assert (fewer.devices, fewer.step) == (8, pytest.approx(wanted, rel=1e-3))
    assert fewer.seconds == pytest.approx(wanted - PLAN.predicted.step, abs=1e-3 * wanted)


def test_the_smallest_cluster_has_the_same_step_and_a_node_less_has_not() -> None:
    """Ten nodes, of which few have anything to do: one step's trajectories are quickly made."""
    (nodes,) = CLUSTER.nodes
    plan = Planner(override(CLUSTER, {nodes.name: 10}), QWEN_06B, RECIPE).plan(CLASSES)
    smallest = explain_plan(plan).smallest
    assert smallest is not None and smallest.step is not None
    ((_, kept, _),) = smallest.nodes
    assert 0 < kept < 10 and smallest.devices == 8 * (10 - kept)
    assert smallest.step == pytest.approx(plan.predicted.step, rel=1e-3)
    one_less = Planner(override(CLUSTER, {nodes.name: kept - 1}), QWEN_06B, RECIPE).plan(CLASSES)
    assert one_less.predicted.step > plan.predicted.step * (1 + 0.5e-3)
