"""A cell of `neighbourhood`: the planner's plan of a case, and all plans near it, simulated.

Invariant: all plans of a cell get the same batches. The best neighbour is chosen by some, and held against the plan by
others as well, which know nothing of the choice.
"""

from __future__ import annotations

from typing import Any

from benchmarks.evaluation.neighbours import neighbours
from benchmarks.evaluation.step_price_cell import GPU_KINDS, SAMPLES
from benchmarks.rollout_price_cases import make_case
from benchmarks.rollout_price_plan import plan_of, routed_case
from benchmarks.rollout_price_steps import simulate_steps

_MEASURED = 10  # steps
_FRESH = 1_000  # the first batch of those that the choice does not know
_FRESH_MEASURED = 20


def near(family: str, seed: int, staleness: int) -> dict[str, Any]:
    """Simulated seconds of a step of the plan and of each of its neighbours. Raises `InfeasiblePlanError`."""
    case = make_case(family, seed, staleness, gpus=GPU_KINDS, samples=SAMPLES)
    plan, menu = routed_case(case)
    request = plan.request
    assert request.kind == "cluster" and plan.layout is not None
    others = [(it.what, plan_of(request, menu, it.allocation)) for it in neighbours(menu.problem, plan.allocation)]
    seconds = [simulate_steps(case, other, _MEASURED).seconds for _, other in others]
    own = simulate_steps(case, plan, _MEASURED).seconds
    best = min(range(len(others)), key=seconds.__getitem__)
    fresh = [simulate_steps(case, it, _FRESH_MEASURED, _FRESH).seconds for it in (plan, others[best][1])]
    return {
        "devices": case.cluster.devices,
        "plan": {"training": plan.layout.devices, "engines": [[b.shape, b.engines] for b in plan.allocation.buckets]},
        "predicted": plan.predicted.step,
        "simulated": own,
        "neighbours": [
            {"what": what, "predicted": other.predicted.step, "simulated": found}
            for (what, other), found in zip(others, seconds, strict=True)
        ],
        "fresh": {"plan": fresh[0], "best": fresh[1]},
    }
