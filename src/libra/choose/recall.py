"""Recall of a router: the share of each class's work that it does not route to a bucket that is too short.

Invariant: the policy is measured on prompts from which it has not learned, unless the log has only one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from libra.lengths import TrajectoryClass
from libra.plan.loan import solve_loans
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.menu import Menu
from libra.plan.plan import Plan, answer
from libra.plan.problem import Problem
from libra.plan.solution import Solution
from libra.route.bucket import bucket_of
from libra.route.catalogue import ignores_buckets
from libra.route.policy import Policy
from libra.sim.of_plan import simulate_plan
from libra.sim.outcome.result import SimulationResult
from libra.trajectory import Trajectory

# Weight of the worst class's recall in the recall of each class, in trajectories: a small log does not prove a good
# recall.
_DOUBT = 8.0


def halves(log: Iterable[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """The trajectories in two halves: by alternating prompts, or by alternating trajectories of a single prompt."""
    prompts: dict[str, list[Trajectory]] = {}
    for trajectory in log:
        prompts.setdefault(trajectory.prompt_id, []).append(trajectory)
    groups = list(prompts.values())
    if len(groups) == 1:
        groups = [[it] for it in groups[0]]
    return [it for group in groups[::2] for it in group], [it for group in groups[1::2] for it in group]


def measured_recall(
    plan: Plan, classes: Sequence[TrajectoryClass], log: Sequence[Trajectory], policy: Policy, seed: int = 0
) -> tuple[float, ...]:
    """[class] share of the tokens after the first tool return that are generated in the class's own bucket or a longer
    one.

    A longer bucket counts, since a router may use it when the class's own bucket is busier. An untrained `policy`
    learns from one half of the log, and routes a step of the plan drawn from the other half. Classes with few
    trajectories are shrunk towards the worst class. Empty if the log has no second half.
    """
    known, unknown = halves(it for it in log if it.finished)
    if not known or not unknown:
        return ()
    result = simulate_plan(plan, unknown, policy, learned=known, seed=seed)
    limits = tuple(bucket.up_to for bucket in plan.allocation.buckets)
    return shrunk(*_by_class(result, classes, limits))


def with_recall(
    request: ClusterRequest,
    log: Sequence[Trajectory],
    policy: Policy,
    *,
    seed: int = 0,
    solved: Callable[[Problem], Solution] = solve,
    measuring: Callable[[], None] = lambda: None,
) -> tuple[ClusterRequest, Menu, Solution]:
    """The request with the recall of its router, its menu, and the menu's optimum.

    The recall is measured on the optimum for a perfect router, if this optimum has several buckets. A recall in the
    recipe is kept. `measuring` is called before the measurement. Raises `InfeasiblePlanError`.
    """
    menu = request.menu()
    best = solve_loans(menu, solved)
    known = request.recipe.router_hit is not None or ignores_buckets(request.recipe.router)
    if known or len(best.allocation.buckets) == 1:
        return request, menu, best
    measuring()
    recall = measured_recall(answer(request, menu, best), request.classes, log, deepcopy(policy), seed)
    request = replace(request, recall=recall)
    menu = request.menu()
    return request, menu, solve_loans(menu, solved)


def _by_class(
    result: SimulationResult, classes: Sequence[TrajectoryClass], limits: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """[class] tokens generated after the first return in the own bucket or a longer one; all tokens generated after the
    first return; and number of trajectories.
    """
    columns = result.requests
    final = np.zeros(len(columns.trajectories), dtype=np.int64)
    np.maximum.at(final, columns.trajectory, columns.prompt + columns.generated)
    peaks = [cls.peak_context for cls in classes]
    cls = np.minimum(np.searchsorted(peaks, final), len(peaks) - 1)
    own = np.array([bucket_of(tokens, limits) for tokens in final.tolist()])
    bucket = np.array([engine.bucket for engine in result.engines])
    later = columns.turn > 0
    tokens = columns.generated[later].astype(float)
    of = columns.trajectory[later]
    hit = tokens * (bucket[columns.engine[later]] >= own[of])
    return (
        np.bincount(cls[of], hit, len(peaks)).astype(np.float64),
        np.bincount(cls[of], tokens, len(peaks)).astype(np.float64),
        np.bincount(cls, minlength=len(peaks)).astype(np.float64),
    )


def shrunk(
    hits: NDArray[np.float64], tokens: NDArray[np.float64], trajectories: NDArray[np.float64]
) -> tuple[float, ...]:
    """[class] recall, as if each class had `_DOUBT` more trajectories with the recall of the worst class. A class
    without tokens after a return has the worst class's recall. All are 1 if no class has such tokens.
    """
    seen = tokens > 0
    if not seen.any():
        return (1.0,) * len(tokens)
    recall = np.divide(hits, tokens, out=np.zeros_like(hits), where=seen)
    worst = float(recall[seen].min())
    weight = np.where(seen, trajectories, 0.0)
    found: list[float] = ((weight * recall + _DOUBT * worst) / (weight + _DOUBT)).tolist()
    return tuple(found)
