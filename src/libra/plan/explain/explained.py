"""A plan explained from what it embeds, and planned again for another cluster or recipe.

Invariant: nothing but the plan is needed: prices, alternatives and what-ifs follow from its request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from libra.config.recipe import Recipe
from libra.hardware.cluster import Cluster, override
from libra.plan.explain.explanation import SAME_STEP, Bound, Explanation, SmallerCluster, bound_of, explain
from libra.plan.explain.idle import IdleDevices, idle_devices
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.price import infeasibility, price
from libra.plan.options.slots import SlotRequest
from libra.plan.plan import Plan, make_plan
from libra.plan.planner import rooflines
from libra.plan.problem import InfeasiblePlanError, Problem


def explain_plan(plan: Plan) -> Explanation:
    """What bounds the plan, the next best ones, what binds and what one more node of each class would buy."""
    request = plan.request
    problem, rejected = plan.menu()
    _require_own(plan, problem)
    if isinstance(request, SlotRequest):
        return explain(problem, plan.solution)
    return explain(
        problem,
        plan.solution,
        larger=_one_node_more(request),
        staler=_one_version_more(request),
        rejected=rejected,
        fewer_nodes=_one_node_fewer(request, plan.predicted.step),
        smallest=_smallest(request, plan.predicted.step),
    )


def bound_and_idle(plan: Plan) -> tuple[Bound, tuple[IdleDevices, ...]]:
    """What the plan's step consists of, and which devices idle, without solving anything."""
    problem, rejected = plan.menu()
    return bound_of(problem, plan.allocation), idle_devices(problem, plan.allocation, rejected)


def assume_otherwise(plan: Plan, cluster: Cluster, recipe: Recipe) -> Plan:
    """The plan for another number of nodes or another recipe, all else as it was; groups stay where they can.

    Raises ValueError for the plan of a run on one machine, or when the cluster has a class of nodes without a profile.
    """
    request = plan.request
    if isinstance(request, SlotRequest):
        raise ValueError("this is the plan of a run on one machine; change the run's configuration and plan again")
    profiles = dict(zip((nodes.name for nodes in request.cluster.nodes), request.profiles, strict=True))
    unknown = [nodes.name for nodes in cluster.nodes if nodes.name not in profiles]
    if unknown:
        raise ValueError(f"the plan has no profile for nodes {', '.join(unknown)}; plan anew with it")
    for field in ("tool_seconds_if_unknown", "max_length"):
        if getattr(recipe, field) != getattr(request.recipe, field):
            raise ValueError(f"{field} is in the statistics that the plan embeds; give it to libra plan --what-if")
    # Profiles are of one width of the weights; other widths have a roofline.
    same_width = recipe.rollout_weight_bytes == request.recipe.rollout_weight_bytes
    known = tuple(profiles[nodes.name] for nodes in cluster.nodes)
    changed = replace(
        request,
        cluster=cluster,
        recipe=recipe,
        profiles=known if same_width else rooflines(cluster, request.model, recipe),
        current=None,
        held=(),
    )
    return make_plan(changed, placed=plan.placement)


def _one_node_fewer(request: ClusterRequest, step: float) -> Iterator[SmallerCluster]:
    for nodes in request.cluster.nodes:
        yield _smaller(request, {nodes.name: nodes.count - 1}, step)


def _smallest(request: ClusterRequest, step: float) -> SmallerCluster | None:
    """The cluster with the same step in which no class can give back another node: one class after the other, the
    fewest nodes by bisection, as fewer nodes never make a step shorter."""
    kept = {nodes.name: nodes.count for nodes in request.cluster.nodes}
    found = None
    for nodes in request.cluster.nodes:
        suffice, too_few = nodes.count, -1
        while suffice - too_few > 1:
            middle = (suffice + too_few) // 2
            smaller = _smaller(request, {**kept, nodes.name: middle}, step)
            if smaller.seconds is not None and smaller.seconds < SAME_STEP * step:
                suffice, found = middle, smaller
            else:
                too_few = middle
        kept[nodes.name] = suffice
    return found


def _smaller(request: ClusterRequest, counts: dict[str, int], step: float) -> SmallerCluster:
    before = {nodes.name: nodes for nodes in request.cluster.nodes}
    left = tuple((name, counts.get(name, nodes.count), nodes.count) for name, nodes in before.items())
    devices = sum((count - kept) * before[name].gpus for name, kept, count in left)
    profiles = tuple(
        profile
        for profile, (_, kept, _) in zip(request.profiles, left, strict=True)
        if kept  # a class without nodes is no class
    )
    try:
        if not profiles:
            raise InfeasiblePlanError("there is no node")
        cluster = override(request.cluster, counts)
        problem = replace(request, cluster=cluster, profiles=profiles, current=None, held=()).menu().problem
        after = solve(problem, tie_break=False).predicted.step
    except InfeasiblePlanError:
        return SmallerCluster(left, devices, None, None)
    return SmallerCluster(left, devices, after, after - step)


def _require_own(plan: Plan, problem: Problem) -> None:
    """Raise ValueError unless the plan's allocation, prediction and bound are those of its request: it may have been
    edited since."""
    reason = infeasibility(problem, plan.allocation)
    if reason is None:
        priced = price(problem, plan.allocation)
        if not math.isclose(priced.step, plan.predicted.step, rel_tol=1e-6):
            reason = f"its request prices a step at {priced.step:.6g} s, the plan says {plan.predicted.step:.6g} s"
        elif solve(problem, tie_break=False).predicted.step < plan.proof.bound * (1 - 1e-6):
            reason = "there is a plan below the bound that it states"
    if reason is not None:
        raise ValueError(f"the plan is not an answer to the request in it: {reason}; plan again")


def _one_version_more(request: ClusterRequest) -> Problem | None:
    """The problem with one more version of staleness; None where devices change sides and there can be none."""
    recipe = request.recipe
    if recipe.mode == "colocated":
        return None
    staler = recipe.model_copy(update={"mode": "async", "staleness": recipe.staleness + 1})
    return replace(request, recipe=staler).menu().problem


def _one_node_more(request: ClusterRequest) -> dict[str, Problem]:
    """By class of nodes, the problem with one more of its nodes. Where even that trains nothing, it is left out."""
    larger: dict[str, Problem] = {}
    for nodes in request.cluster.nodes:
        cluster = override(request.cluster, {nodes.name: nodes.count + 1})
        try:
            larger[nodes.name] = replace(request, cluster=cluster).menu().problem
        except InfeasiblePlanError:
            continue
    return larger
