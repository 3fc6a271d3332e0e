"""The sentences that open a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_14B, RECIPE

from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.plan.planner import Planner
from libra.report.plan_headline import headline

H100 = GPUS["H100"]


@pytest.mark.parametrize(("memory", "spans"), [(H100.memory, False), (20e9, True)])
def test_engines_on_several_nodes_are_told_with_what_is_not_measured(memory: float, spans: bool) -> None:
    """30 GB of weights are more than two small GPUs hold."""
    gpu = replace(H100, memory=memory, visible=None)
    cluster = Cluster((NodeClass("small", 64, 2, gpu, H100.link, 100e9),))
    sentences = headline(Planner(cluster, QWEN_14B, RECIPE).plan(CLASSES))
    told = "An engine of small/tp8 is on 4 nodes: its all-reduces cross the network. No such engine has been measured."
    assert (told in sentences) == spans == any("all-reduces cross" in each for each in sentences)


def test_states_on_the_host_are_told_in_gigabytes() -> None:
    """12 bytes for each of 14.8 billion parameters, divided evenly among the devices, of which a host has up to 8."""
    plan = Planner(CLUSTER, QWEN_14B, RECIPE.model_copy(update={"offload_optimiser": True})).plan(CLASSES)
    assert plan.layout is not None
    share = min(8, plan.layout.devices) / plan.layout.devices
    (memory,) = (it for it in headline(plan) if it.startswith("Memory of a GPU"))
    assert f"A trainer's host needs {12 * QWEN_14B.parameters * share / 1e9:.0f} GB for optimiser state" in memory
    assert "host" not in " ".join(headline(Planner(CLUSTER, QWEN_14B, RECIPE).plan(CLASSES)))


def test_gpus_that_take_turns_are_counted_once() -> None:
    plan = Planner(CLUSTER, QWEN_14B, RECIPE.model_copy(update={"mode": "colocated", "staleness": 0})).plan(CLASSES)
    split = next(it for it in headline(plan) if " train" in it)
    assert split.startswith(f"{CLUSTER.devices} GPUs generate and then train ("), split
