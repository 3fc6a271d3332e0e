"""Errors of plans without a layout name the nearest change with which there is a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from oracles.small_cluster import CLASSES, QWEN_06B, QWEN_14B

from libra.config.recipe import Recipe
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.plan.model.feasibility import conflict
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.layouts import training_layouts
from libra.plan.options.nearest import more_nodes, remedies
from libra.plan.planner import rooflines
from libra.plan.problem import InfeasiblePlanError

H100 = GPUS["H100"]
RECIPE = Recipe(batch=512, samples_per_prompt=16, max_length=8192)


def node(count: int, gpus: int = 8) -> NodeClass:
    return NodeClass("h100", count, gpus, H100, H100.link, gpus * 50e9)


def request(model: ModelSpec, *nodes: NodeClass, recipe: Recipe = RECIPE) -> ClusterRequest:
    return ClusterRequest(Cluster(nodes), model, recipe, CLASSES, rooflines(Cluster(nodes), model, recipe))


def plans(asked: ClusterRequest, count: int) -> bool:
    """Whether there is a plan with this number of nodes."""
    nodes = replace(asked.cluster.nodes[0], count=count)
    try:
        return not conflict(replace(asked, cluster=Cluster((nodes,))).menu().problem)
    except InfeasiblePlanError:
        return False


@pytest.mark.parametrize("mode", ["async", "colocated"])
@pytest.mark.parametrize(
    ("model", "nodes"),
    [(QWEN_14B, node(1, gpus=1)), (QWEN_14B, node(1, gpus=2)), (load_model("Qwen/Qwen3-235B-A22B"), node(4))],
    ids=["14B on single GPUs", "14B", "235B"],
)
def test_one_node_less_has_no_plan(model: ModelSpec, nodes: NodeClass, mode: Literal["async", "colocated"]) -> None:
    recipe = RECIPE.model_copy(update={"mode": mode, "staleness": int(mode == "async")})
    asked = request(model, nodes, recipe=recipe)
    found = more_nodes(asked, nodes)
    assert found is not None
    count, words = found
    assert nodes.count < count and plans(asked, count) and not plans(asked, count - 1)
    assert words.endswith(("generates", "generate") if mode == "async" else ", and generate in turn")


def test_training_and_an_engine_are_counted_together() -> None:
    """Four GPUs train, and none of them has room for an engine beside."""
    apart, shared = (
        more_nodes(request(QWEN_14B, node(1, gpus=1), recipe=recipe), node(1, gpus=1))
        for recipe in (RECIPE, RECIPE.model_copy(update={"mode": "colocated", "staleness": 0}))
    )
    assert apart is not None and shared is not None
    assert apart[0] == shared[0] + 1 and apart[1].endswith(", 1 generates")


def test_235_billion_train_on_32_gpus_with_states_on_the_host_alone() -> None:
    """As reported of slime (THUDM/slime#280): impossible on 32 H100 without offloading."""
    model = load_model("Qwen/Qwen3-235B-A22B")
    assert not training_layouts(model, node(4), RECIPE, CLASSES).chosen
    lighter = RECIPE.model_copy(update={"offload_optimiser": True})
    assert training_layouts(model, node(4), lighter, CLASSES).chosen


def test_what_no_number_of_nodes_trains_has_no_remedy() -> None:
    tiny = replace(node(1), gpu=replace(H100, memory=2**30))
    asked = request(QWEN_14B, tiny)
    assert more_nodes(asked, tiny) is None
    assert not list(remedies(asked))


@pytest.mark.parametrize(
    ("memory", "change"),
    [
        (17e9, "reference: offloaded"),
        (12e9, "offload_optimiser: true"),
        (9.5e9, "offload_optimiser: true and reference: offloaded"),
        (8e9, None),
    ],
)
def test_the_smallest_change_of_the_recipe_comes_first(memory: float, change: str | None) -> None:
    """Of 0.6 billion parameters with 16 bytes each, a reference of 2 and the activations of a step."""
    room = replace(node(1, gpus=1), gpu=replace(H100, memory=memory))
    kept = RECIPE.model_copy(update={"reference": "resident", "mode": "colocated", "staleness": 0})
    assert not training_layouts(QWEN_06B, room, kept, CLASSES).chosen
    first, *_ = (*remedies(request(QWEN_06B, room, recipe=kept)), "nothing")
    assert first == change or (change is None and "nodes of h100" in first), first
