"""Two kinds of GPU that are good at different things, a small model, and plans with prefill/decode pairs on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from libra.config.recipe import Recipe
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.parallel import ParallelLayout
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.price import solution
from libra.plan.placement import DeviceGroup
from libra.plan.plan import Plan, answer
from libra.plan.planner import rooflines
from oracles.small_cluster import LONG, QWEN_06B, SHORT

H20 = GPU("H20", 96e9, 4e12, 148e12, 450e9, "NVIDIA H20 data sheet")
FAST = NodeClass("fast", 1, 4, GPUS["H100"], intra_bandwidth=450e9, inter_bandwidth=50e9)
WIDE = NodeClass("wide", 1, 4, H20, intra_bandwidth=450e9, inter_bandwidth=50e9)
BOTH = Cluster((FAST, WIDE))
# Agents with long tool returns and short answers.
TOLD = tuple(replace(cls, prefill=20 * cls.prefill) for cls in (SHORT, LONG))
LONGEST = 8192


def paired_recipe(**others: Any) -> Recipe:
    return Recipe(**{"batch": 16, "samples_per_prompt": 4, "max_length": LONGEST, "prefill_decode": True, **others})


def paired_plan(
    recipe: Recipe,
    buckets: Sequence[tuple[str, int, int]],  # shape, engines, longest final context
    placed: Sequence[DeviceGroup] = (),
) -> Plan:
    """The plan with these engines and one trainer on an H100, even if another plan would be faster."""
    layout = ParallelLayout(1, 1, 1, 1, 1, LONGEST, "none", "zero1", False)
    made, above = [], 0
    for shape, engines, up_to in buckets:
        made.append(Bucket(shape, engines, above, up_to))
        above = up_to
    allocation = Allocation(1, tuple(made), f"fast/{layout.family}")
    profiles = rooflines(BOTH, QWEN_06B, recipe)
    request = ClusterRequest(BOTH, QWEN_06B, recipe, TOLD, profiles, allocation, (("fast", layout),))
    menu = request.menu()
    return answer(request, menu, solution(menu.problem, allocation), placed)
