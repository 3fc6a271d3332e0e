"""Random plans, each for a framework that may carry it out."""

from __future__ import annotations

import random
from dataclasses import replace

from oracles.small_cluster import A800, CLASSES, QWEN_06B, QWEN_14B

from libra.config.frameworks import FRAMEWORKS
from libra.config.recipe import Recipe
from libra.hardware.cluster import GPUS, Cluster
from libra.hardware.model_file import load_model
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.plan import Plan, make_plan
from libra.plan.planner import rooflines
from libra.plan.problem import InfeasiblePlanError

MODELS = (QWEN_06B, QWEN_06B, QWEN_14B, load_model("Qwen/Qwen3-30B-A3B"))


def random_plan(seed: int, name: str | None = None) -> Plan | None:
    """A plan for the named framework, or for a random one; None where the draw has no plan."""
    rng = random.Random(seed)
    framework = FRAMEWORKS[rng.choice(list(FRAMEWORKS)) if name is None else name]
    gpus, gpu = rng.choice((4, 8)), rng.choice(("A800", "H200"))
    cluster = Cluster((replace(A800, count=rng.choice((1, 2, 3, 4)), gpus=gpus, gpu=GPUS[gpu]),))
    model = rng.choice(MODELS)
    samples = rng.choice((1, 4, 8))
    recipe = Recipe(
        batch=samples * rng.choice((4, 16, 32)),
        samples_per_prompt=samples,
        max_length=rng.choice((4096, 8192)),
        staleness=rng.choice((0, 1, 1 if framework.most_staleness == 1 else 3)),
        framework=framework.name,
        prefill_decode=framework.pairs and rng.random() < 0.5,
        **({"router": "cmlfq"} if rng.random() < 0.5 else {}),  # type: ignore[arg-type]
    )
    try:
        return make_plan(ClusterRequest(cluster, model, recipe, CLASSES, rooflines(cluster, model, recipe)))
    except InfeasiblePlanError:
        return None
