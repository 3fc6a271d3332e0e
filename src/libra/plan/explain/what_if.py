"""A request changed to another cluster or recipe: by text such as `gpus=64`, with more or fewer nodes, or with more
staleness.

Invariant: only the named values change. The message that refuses an unknown name lists the known names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError, unknown
from libra.cost.grid import EngineProfile
from libra.cost.quantization import rollout_quantization
from libra.cost.sources.roofline import node_roofline
from libra.hardware.cluster import Cluster, override, with_gpu, with_gpus
from libra.hardware.cluster_file import gpu_of
from libra.plan.explain.explanation import SmallerCluster
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.slots import SlotRequest
from libra.plan.plan import Plan, make_plan
from libra.plan.planner import rooflines
from libra.plan.problem import InfeasiblePlanError, Problem

SAME_STEP = 1e-3  # relative difference up to which the step of a smaller cluster counts as equal to the plan's


def assume(cluster: Cluster, recipe: Recipe, assumptions: Sequence[str]) -> tuple[Cluster, Recipe]:
    """Apply assumptions in order: `gpus=N` (of the whole cluster), `gpu=NAME` (another GPU in its nodes), `CLASS=N`
    (nodes of a class, or of a serving pool) or `KEY=VALUE` of the recipe.

    Raises `ConfigError` that names the assumption.
    """
    changes: dict[str, Any] = {}
    of_recipe = []
    classes = {nodes.name for nodes in cluster.nodes} | {pool.name for pool in cluster.serving}
    for text in assumptions:
        key, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"--what-if {text}: give KEY=VALUE, such as gpus=64 or batch=1024")
        try:
            if key == "gpus":
                cluster = with_gpus(cluster, _count(value))
            elif key == "gpu":
                cluster = with_gpu(cluster, gpu_of(value, "gpu"))
            elif key in classes:
                cluster = override(cluster, {key: _count(value)})
            elif key in Recipe.model_fields:
                changes[key] = _value(value)
                of_recipe.append(text)
            else:
                raise ConfigError(unknown("what-if", key, ("gpus", "gpu", *sorted(classes), *Recipe.model_fields)))
        except ValueError as error:
            raise ConfigError(f"--what-if {text}: {' '.join(str(error).split())}") from None
    if not changes:
        return cluster, recipe
    kept = {name: getattr(recipe, name) for name in recipe.model_fields_set}
    if "mode" in changes:
        kept.pop("staleness", None)  # each mode has its own default, unless `staleness=N` is assumed as well
    try:
        return cluster, Recipe(**{**kept, **changes})
    except ValidationError as error:
        problem = error.errors()[0]
        key, message = ".".join(str(part) for part in problem["loc"]), problem["msg"].removeprefix("Value error, ")
        wrong = f"{key}: {message}" if key else message
        raise ConfigError(f"--what-if {' '.join(of_recipe)}: {wrong}") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a count; give a whole number, 0 or more")
    return int(text)


def _value(text: str) -> Any:
    """A JSON number or null; any other text is returned unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def held_fixed(before: Recipe, after: Recipe) -> str:
    """A note on settings of the plan that a new plan from the log would change; empty if there is no such setting."""
    if before.batch == after.batch:
        return ""
    return (
        f"trajectories keep their weights from the plan with batch {before.batch:,}; libra plan --what-if "
        f"batch={after.batch} weighs its log by the new batch, and may differ"
    )


def assume_otherwise(plan: Plan, cluster: Cluster, recipe: Recipe) -> Plan:
    """Plan the request again for another cluster or recipe. Groups keep their places where possible.

    Raises ValueError for the plan of a run on one machine, for a class of nodes without a profile, and for a recipe
    that changes the plan's statistics.
    """
    request = plan.request
    if isinstance(request, SlotRequest):
        raise ValueError("the plan is for a run on one machine: change the run's configuration and plan again")
    profiles = dict(zip((nodes.name for nodes in request.cluster.nodes), request.profiles, strict=True))
    gpus = {nodes.name: nodes.gpu for nodes in request.cluster.nodes}
    unknown = [nodes.name for nodes in cluster.nodes if nodes.name not in profiles]
    if unknown:
        raise ValueError(f"the plan has no profile for nodes {', '.join(unknown)}: plan again with these nodes")
    for field in ("tool_seconds_if_unknown", "max_length"):
        if getattr(recipe, field) != getattr(request.recipe, field):
            raise ValueError(f"{field} is part of the plan's statistics: give it to libra plan --what-if instead")
    # A profile is for one GPU and one quantisation; a roofline serves for all others.
    lenders = tuple(
        (lender, profile)
        for lender, profile in zip(request.lenders, request.lent_profiles, strict=True)
        if lender.pool in {pool.name for pool in cluster.serving}
    )
    same = rollout_quantization(recipe) == rollout_quantization(request.recipe) and all(
        nodes.gpu == gpus[nodes.name] for nodes in cluster.nodes
    )
    known = tuple(profiles[nodes.name] for nodes in cluster.nodes)
    changed = replace(
        request,
        cluster=cluster,
        recipe=recipe,
        profiles=known if same else _same_host(rooflines(cluster, request.model, recipe), known),
        current=None,
        held=(),
        lenders=tuple(lender for lender, _ in lenders),
        lent_profiles=tuple(profile for _, profile in lenders)
        if same
        else _same_host(
            [node_roofline(cluster.serving_pool(lender.pool).nodes, request.model, recipe) for lender, _ in lenders],
            [profile for _, profile in lenders],
        ),
    )
    return make_plan(changed, placed=plan.placement)


def _same_host(others: Sequence[EngineProfile], known: Sequence[EngineProfile]) -> tuple[EngineProfile, ...]:
    return tuple(other.beside(one.host, one.terms) for other, one in zip(others, known, strict=True))


def one_node_fewer(request: ClusterRequest, step: float) -> Iterator[SmallerCluster]:
    for nodes in request.cluster.nodes:
        yield _smaller(request, {nodes.name: nodes.count - 1}, step)


def smallest_cluster(request: ClusterRequest, step: float) -> SmallerCluster | None:
    """Find a smallest cluster with the same step; None if every node is needed.

    Bisects the number of nodes of one class after another, which is correct since fewer nodes never shorten a step.
    """
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
        if kept  # a cluster has no classes without nodes
    )
    try:
        if not profiles:
            raise InfeasiblePlanError("no node is left")
        cluster = override(request.cluster, counts)
        problem = replace(request, cluster=cluster, profiles=profiles, current=None, held=()).menu().problem
        after = solve(problem, tie_break=False).predicted.step
    except InfeasiblePlanError:
        return SmallerCluster(left, devices, None, None)
    return SmallerCluster(left, devices, after, after - step)


def one_version_more(request: ClusterRequest) -> Problem | None:
    """The problem with one more version of staleness; None for colocated devices, where staleness must be 0."""
    recipe = request.recipe
    if recipe.mode == "colocated":
        return None
    staler = recipe.model_copy(update={"mode": "async", "staleness": recipe.staleness + 1})
    return replace(request, recipe=staler).menu().problem


def one_node_more(request: ClusterRequest) -> dict[str, Problem]:
    """The problem with one more node, by class of nodes. Classes are missing if the larger cluster still cannot train
    or generate.
    """
    larger: dict[str, Problem] = {}
    for nodes in request.cluster.nodes:
        cluster = override(request.cluster, {nodes.name: nodes.count + 1})
        try:
            larger[nodes.name] = replace(request, cluster=cluster).menu().problem
        except InfeasiblePlanError:
            continue
    return larger
