"""A cluster of two nodes, a small model and two classes of trajectories, for which planning is fast."""

from __future__ import annotations

import random

from libra.config.recipe import Recipe
from libra.cost.engine_memory import kv_tokens
from libra.cost.quantization import rollout_quantization
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.decoder import decoder
from libra.hardware.model import ModelSpec
from libra.lengths import TrajectoryClass
from libra.trajectory import Trajectory, Turn

SHORT = TrajectoryClass(0.75, 1000, 900.0, 100.0, 50_000.0, 1000.0, 2.0, 3.0, 0.6)
LONG = TrajectoryClass(0.25, 4000, 3500.0, 400.0, 800_000.0, 2000.0, 4.0, 10.0, 0.5)
CLASSES = (SHORT, LONG)

A800 = NodeClass("a800", 2, 8, GPUS["A800"], intra_bandwidth=200e9, inter_bandwidth=25e9)
CLUSTER = Cluster((A800,))
QWEN_06B = decoder("Qwen/Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, True, 40960, qk_norm=True)
QWEN_14B = decoder("Qwen/Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, False, 40960, qk_norm=True)
RECIPE = Recipe(batch=64, samples_per_prompt=8, max_length=8192)


def kv_of(recipe: Recipe, model: ModelSpec, tp: int, nodes: NodeClass = A800) -> int:
    """Tokens for which an engine has KV memory under the recipe."""
    return kv_tokens(
        model,
        nodes.gpu.usable,
        recipe.gpu_memory_utilization,
        tp,
        batched_tokens=recipe.max_batched_tokens,
        quantization=rollout_quantization(recipe),
    )


def trajectories(version: int, calls: int, count: int = 256, *, finished: bool = True) -> list[Trajectory]:
    """Trajectories of about `calls` tool calls with 100 + 100 tokens each, within the recipe's longest context."""
    rng = random.Random(version)
    made = []
    for number in range(count):
        turns = (Turn(100, "tool", "ok", 100, 1.0),) * min(38, max(1, round(calls * rng.lognormvariate(0, 0.4))))
        last = (Turn(100, None, None, 0),) if finished else ()
        name = f"{version}.{number}"
        made.append(Trajectory(name, name, "made", 200, turns + last, None, version, finished))
    return made
