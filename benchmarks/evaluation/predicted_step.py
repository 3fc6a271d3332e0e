"""A cell of `step-price`: predicted and simulated seconds of a step of a random case.

Invariant: no case has a family or a seed that factors were fitted to.
"""

from __future__ import annotations

from typing import Any

from libra.plan.problem import InfeasiblePlanError
from tests.oracles.random_clusters import TESTED, make_case, routed_case, simulate_steps

FIRST_SEED = 3_000  # of its cases; those of the fits are below 1,000
_ANOTHER = 1_000  # is added to the seed of a case that has no plan
_DRAWS = 10


def step(family: str, seed: int, staleness: int) -> dict[str, Any]:
    """Predicted and simulated seconds of a step. A case that has no plan is left out, and another is drawn."""
    if family not in TESTED or seed < FIRST_SEED:
        raise ValueError(f"{family} {seed} may have been fitted to: give one of {TESTED} and {FIRST_SEED} or more")
    for draw in range(_DRAWS):
        case = make_case(family, seed + draw * _ANOTHER, staleness, gpus=("A800", "H800"), samples=(8, 16))
        try:
            plan, _ = routed_case(case)
        except InfeasiblePlanError:
            continue
        simulated = simulate_steps(case, plan)
        assert plan.layout is not None
        return {
            "drawn": case.name,
            "devices": case.cluster.devices,
            "model": case.model.name,
            "experts": case.model.experts is not None,
            "buckets": [[bucket.shape, bucket.engines, bucket.up_to] for bucket in plan.allocation.buckets],
            "training_devices": plan.layout.devices,
            "bottleneck": plan.predicted.bottleneck,
            "predicted": plan.predicted.step,
            "simulated": simulated.seconds,
            "each": list(simulated.each),
            "predicted_training": plan.predicted.training,
            "simulated_training": simulated.training,
        }
    raise RuntimeError(f"{family}, seed {seed}: none of {_DRAWS} cases drawn has a plan; give another seed")
