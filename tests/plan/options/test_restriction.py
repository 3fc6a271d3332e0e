"""The menu of a framework: what it keeps, what it leaves out and why, and what it says where no plan is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import A800, CLASSES, CLUSTER, QWEN_06B, QWEN_14B, RECIPE

from libra.config.frameworks import FRAMEWORKS
from libra.config.recipe import Recipe
from libra.hardware.cluster import Cluster
from libra.hardware.model import ModelSpec
from libra.plan.explain.framework_cost import framework_cost
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.restriction import family_of
from libra.plan.plan import dump_plan, make_plan, parse_plan
from libra.plan.planner import rooflines
from libra.plan.problem import InfeasiblePlanError


def recipe_for(name: str | None, **changes: object) -> Recipe:
    given = {key: getattr(RECIPE, key) for key in RECIPE.model_fields_set}
    return Recipe.model_validate({**given, "framework": name, **changes})


def request(
    name: str | None, cluster: Cluster = CLUSTER, model: ModelSpec = QWEN_14B, **changes: object
) -> ClusterRequest:
    recipe = recipe_for(name, **changes)
    return ClusterRequest(cluster, model, recipe, CLASSES, rooflines(cluster, model, recipe))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_layout_of_a_menu_is_one_of_the_framework(name: str) -> None:
    framework, menu = FRAMEWORKS[name], request(name).menu()
    for layout in menu.layouts.values():
        if framework.families:
            family = family_of(framework, layout, QWEN_14B.layers)
            assert family is not None
            assert layout.sharding in family.shardings or layout.dp * layout.cp == 1
        if framework.whole_nodes:
            assert layout.devices % A800.gpus == 0
    assert menu.problem.use_all_devices == framework.whole_nodes
    if not framework.mixed_engines:
        assert menu.problem.most_buckets == 1


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_plan_is_within_the_restriction_and_costs_what_is_said(name: str) -> None:
    framework, plan = FRAMEWORKS[name], make_plan(request(name))
    assert parse_plan(dump_plan(plan)) == plan
    training = [group for group in plan.placement if group.role == "train"]
    rollout = [group for group in plan.placement if group.role != "train"]
    if framework.whole_nodes:
        assert not {node for it in training for node in it.nodes} & {node for it in rollout for node in it.nodes}
        assert sum(group.devices for group in plan.placement) == CLUSTER.devices
    if not framework.mixed_engines:
        assert len({group.name for group in rollout}) == 1
    cost = framework_cost(plan)
    assert cost is not None
    assert cost.framework == name
    assert cost.step == plan.predicted.step
    free = make_plan(request(None))
    assert cost.free == pytest.approx(free.predicted.step, rel=1e-3)


def test_without_a_framework_there_is_no_cost() -> None:
    assert framework_cost(make_plan(request(None))) is None


def test_a_single_node_is_shared() -> None:
    alone = Cluster((replace(A800, count=1),))
    plan = make_plan(request("verl", alone, QWEN_06B))
    assert {group.role for group in plan.placement} == {"train", "generate"}


def test_what_is_left_out_has_its_reason() -> None:
    rejected = {it.name: it for it in request("trl").rejected_layouts()}
    parts = rejected["a800/part of a node"]
    assert (parts.kind, parts.reason) == ("framework", "trl trains on whole nodes of 8 GPUs")
    reasons = {it.reason for it in rejected.values() if it.kind == "framework"}
    assert "trl trains by FSDP, which has no such layout" in reasons
    names = {it.name for it in rejected.values() if "no such layout" in it.reason}
    assert any(name.startswith("tp2 ") for name in names)
    assert not any(name.startswith("tp1 pp1 cp1 dp* zero3") for name in names)


def test_a_menu_without_framework_says_nothing_of_frameworks() -> None:
    assert all(it.kind != "framework" for it in request(None).rejected_layouts())
    assert request(None).menu().problem.restriction == ""


def test_without_a_plan_the_restriction_and_its_remedy_are_named() -> None:
    # Two nodes of different kinds: with engines of one size, one of them would be idle or train only in part.
    two = Cluster((replace(A800, count=2), replace(A800, name="more", count=2)))
    with pytest.raises(InfeasiblePlanError) as raised:
        make_plan(request("verl", two, QWEN_06B, batch=8, samples_per_prompt=8))
    assert "for verl only engines of one size, whole nodes" in str(raised.value)
    assert "leave out framework (--for)" in str(raised.value)
    assert make_plan(request(None, two, QWEN_06B, batch=8, samples_per_prompt=8))


def test_where_nothing_trains_the_restriction_is_named() -> None:
    narrow = Cluster((replace(A800, count=1, gpus=2),))
    with pytest.raises(InfeasiblePlanError, match=r"no layout trains .*; for trl only"):
        make_plan(request("trl", narrow, QWEN_14B))
