"""Plans explained from what they embed, and planned again for what is assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_06B, RECIPE

from libra.hardware.cluster import override
from libra.plan.explain.explained import assume_otherwise, explain_plan
from libra.plan.plan import Plan
from libra.plan.planner import Planner, rooflines

PLANNER = Planner(CLUSTER, QWEN_06B, RECIPE)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return PLANNER.plan(CLASSES)


def test_another_cluster_or_recipe_is_planned_as_if_asked_for_at_once(plan: Plan) -> None:
    (nodes,) = CLUSTER.nodes
    larger = override(CLUSTER, {nodes.name: nodes.count + 1})
    slower = RECIPE.model_copy(update={"staleness": 0})
    for cluster, recipe in ((larger, RECIPE), (CLUSTER, slower)):
        wanted = Planner(cluster, QWEN_06B, recipe).plan(CLASSES)
        found = assume_otherwise(plan, cluster, recipe)
        assert (found.request, found.allocation, found.predicted) == (
            wanted.request,
            wanted.allocation,
            wanted.predicted,
        )


def test_other_weights_have_profiles_of_their_own(plan: Plan) -> None:
    narrow = RECIPE.model_copy(update={"rollout_dtype": "fp8"})
    found = assume_otherwise(plan, CLUSTER, narrow)
    assert found.request == Planner(CLUSTER, QWEN_06B, narrow).request(CLASSES)
    assert found.request.profiles == rooflines(CLUSTER, QWEN_06B, narrow) != plan.request.profiles  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [{"tool_seconds_if_unknown": 9.0}, {"max_length": 8191}])
def test_what_the_statistics_were_made_with_cannot_be_assumed_otherwise(plan: Plan, change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))} is in the statistics .*; give it to libra plan"):
        assume_otherwise(plan, CLUSTER, RECIPE.model_copy(update=change))


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


def test_a_plan_that_does_not_answer_its_request_is_not_explained(plan: Plan) -> None:
    (nodes,) = CLUSTER.nodes
    larger = override(CLUSTER, {nodes.name: 1000})
    for edited in (
        replace(plan, request=replace(plan.request, cluster=larger)),  # type: ignore[type-var]
        replace(plan, allocation=replace(plan.allocation, replicas=99)),
        replace(plan, predicted=replace(plan.predicted, step=plan.predicted.step * 0.9)),
        replace(plan, proof=replace(plan.proof, bound=plan.proof.bound * 2)),
    ):
        with pytest.raises(ValueError, match=r"the plan is not an answer to the request in it: .*; plan again"):
            explain_plan(edited)


def test_what_fewer_nodes_cost_is_the_price_of_their_best_plan(plan: Plan) -> None:
    explained = explain_plan(plan)
    (nodes,) = CLUSTER.nodes
    (fewer,) = explained.fewer_nodes
    wanted = Planner(override(CLUSTER, {nodes.name: nodes.count - 1}), QWEN_06B, RECIPE).plan(CLASSES).predicted.step
    assert fewer.nodes == ((nodes.name, nodes.count - 1, nodes.count),)
    assert (fewer.devices, fewer.step) == (8, pytest.approx(wanted, rel=1e-3))
    assert fewer.seconds == pytest.approx(wanted - plan.predicted.step, abs=1e-3 * wanted)


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
