"""The sentences that open a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import CLASSES, QWEN_14B, RECIPE

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
    told = "An engine of small/tp8 is on 4 nodes: its all-reduces cross the network, for which no run was measured."
    assert (told in sentences) == spans == any("all-reduces cross" in each for each in sentences)
