"""A plan explained from what it embeds, and planned again for another cluster or recipe.

Invariant: nothing but the plan is needed: prices, alternatives and what-ifs follow from its request.
"""

from __future__ import annotations

import math
from dataclasses import replace

from libra.config.recipe import Recipe
from libra.hardware.cluster import Cluster, override
from libra.plan.explain.explanation import Explanation, explain
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
    if isinstance(request, SlotRequest):
        problem = request.problem()
        _require_own(plan, problem)
        return explain(problem, plan.solution)
    menu = request.menu()
    _require_own(plan, menu.problem)
    rejected = [(rejected.layout, rejected.reason) for rejected in menu.rejected_layouts]
    rejected += [(rejected.shape, rejected.reason) for rejected in menu.rejected_engines]
    return explain(
        menu.problem,
        plan.solution,
        larger=_one_node_more(request),
        staler=_one_version_more(request),
        rejected=rejected,
    )


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
