"""Errors of plans without a layout name the nearest change that allows training."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import CLASSES, QWEN_06B, QWEN_14B

from libra.config.recipe import Recipe
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.plan.options.layouts import training_layouts
from libra.plan.options.nearest import more_nodes, remedies

H100 = GPUS["H100"]
RECIPE = Recipe(batch=512, samples_per_prompt=16, max_length=8192)


def node(count: int, gpus: int = 8) -> NodeClass:
    return NodeClass("h100", count, gpus, H100, H100.link, gpus * 50e9)


@pytest.mark.parametrize(
    ("model", "nodes"),
    [(QWEN_14B, node(1, gpus=2)), (load_model("Qwen/Qwen3-235B-A22B"), node(4))],
    ids=["14B", "235B"],
)
def test_one_node_less_does_not_train(model: ModelSpec, nodes: NodeClass) -> None:
    found = more_nodes(model, nodes, RECIPE, CLASSES)
    assert found is not None
    count, layout = found
    assert nodes.count < count and layout.devices <= count * nodes.gpus
    there = training_layouts(model, replace(nodes, count=count), RECIPE, CLASSES).chosen.values()
    assert layout in there and layout.devices == min(each.devices for each in there)
    assert not training_layouts(model, replace(nodes, count=count - 1), RECIPE, CLASSES).chosen


def test_235_billion_train_on_32_gpus_with_states_on_the_host_alone() -> None:
    """As reported of slime (THUDM/slime#280): impossible on 32 H100 without offloading."""
    model = load_model("Qwen/Qwen3-235B-A22B")
    assert not training_layouts(model, node(4), RECIPE, CLASSES).chosen
    assert next(remedies(model, Cluster((node(4),)), RECIPE, CLASSES)) == "offload_optimiser: true"


def test_what_no_number_of_nodes_trains_has_no_remedy() -> None:
    tiny = replace(node(1), gpu=replace(H100, memory=2**30))
    assert more_nodes(QWEN_14B, tiny, RECIPE, CLASSES) is None
    assert not list(remedies(QWEN_14B, Cluster((tiny,)), RECIPE, CLASSES))


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
    kept = RECIPE.model_copy(update={"reference": "resident"})
    assert not training_layouts(QWEN_06B, room, kept, CLASSES).chosen
    first, *_ = (*remedies(QWEN_06B, Cluster((room,)), kept, CLASSES), "nothing")
    assert first == change or (change is None and "nodes of h100" in first)
