"""The plan of a cluster of GPUs, from the files and options of `libra plan`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from libra.choose.choice import ChoiceProgress, choose_plan
from libra.choose.effort import Effort
from libra.cli.lenders import load_lenders
from libra.cli.output import reading, told_before
from libra.config.frameworks import framework_named
from libra.config.recipe import Recipe, load_recipe
from libra.cost.quantization import rollout_quantization
from libra.cost.sources.profiles import engine_profiles
from libra.cost.unmeasured import unmeasured
from libra.hardware.cluster import Cluster
from libra.hardware.cluster_file import load_cluster
from libra.hardware.model_file import load_model
from libra.plan.explain.what_if import assume
from libra.plan.offline import LogEvidence, gather_workload
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.plan import Plan, Solver, solver_named
from libra.plan.planner import Planner
from libra.report.live import SimulationProgress
from libra.route.custom import load_policy, looks_at_buckets
from libra.route.policy import Policy
from libra.trajectory import Trajectory, read_trajectories, read_workload


def plan_cluster(
    where: Path,
    log: Path,
    model: str,
    request: Path | None,
    profile: str,
    host: str,
    truncate: bool,
    what_if: list[str],
    longest_tool_call: float | None,
    solver: Solver,
    notes: list[str],
    router: str | None,
    framework: str | None,
    simulated: tuple[float, int | None, int] | None,
) -> tuple[Plan, LogEvidence]:
    """`simulated` are seconds, processes and seed of the comparison by simulation; None: none is made."""
    cluster, shape = load_cluster(where), load_model(model, notes.append)
    recipe = _recipe(request, shape.max_context, framework, notes)
    lenders = load_lenders(where, cluster)
    notes += [f"{pool.name} serves and lends nothing: it has no `lends`" for pool in cluster.serving if not pool.lends]
    cluster, recipe = assume(cluster, recipe, what_if)
    stored = rollout_quantization(recipe).note(shape)
    notes += [it for it in (stored, unmeasured(shape)) if it is not None]
    recipe, policy = _routed(recipe, router, notes)
    evidence = gather_workload(
        recipe, _read(log, read_workload(log, recipe.max_length, truncate, notes.append)), longest_tool_call
    )
    if truncate:
        cut = sum(
            trajectory.peak_context > recipe.max_length
            for trajectory in _read(log, read_trajectories(log, told_before))
        )
        notes.append(
            f"{cut:,} of {evidence.finished + evidence.unfinished:,} trajectories cut at {recipe.max_length:,}"
        )
    profiles = engine_profiles(cluster, shape, recipe, profile, notes.append, host)
    left = {pool.name: pool.nodes for pool in cluster.serving}
    lenders = tuple(lender for lender in lenders if lender.pool in left)
    lending = Cluster(tuple(left[lender.pool] for lender in lenders)) if lenders else None
    lent = () if lending is None else engine_profiles(lending, shape, recipe, profile, lambda _: None, host)
    planner = Planner(cluster, shape, recipe, profiles, lenders, lent)
    if simulated is None:
        return planner.plan(evidence.tracker, solver=solver), evidence
    return _simulated(planner.request(evidence.tracker), evidence, policy, solver, simulated), evidence


def _read(log: Path, trajectories: Iterator[Trajectory]) -> Iterator[Trajectory]:
    return reading(log, trajectories, "trajectories")


def _simulated(
    request: ClusterRequest,
    evidence: LogEvidence,
    policy: Policy,
    solver: Solver,
    simulated: tuple[float, int | None, int],
) -> Plan:
    seconds, jobs, seed = simulated
    effort = Effort(seconds, len(os.sched_getaffinity(0)) if jobs is None else jobs, seed)
    with SimulationProgress(sys.stderr) as shown:

        def tell(moment: ChoiceProgress) -> None:
            shown.tell(f"{moment.words}: {moment.done} of {moment.of}" if moment.of else moment.words)

        return choose_plan(
            request, evidence.recent, router=policy, effort=effort, solved=solver_named(solver), tell=tell
        )


def _routed(recipe: Recipe, router: str | None, notes: list[str]) -> tuple[Recipe, Policy]:
    """The recipe with `router`, if given, and its policy. A policy that ignores buckets gets one engine size."""
    if router is not None:
        recipe = recipe.model_copy(update={"router": router})
    policy = load_policy(recipe.router)
    if not looks_at_buckets(policy) and recipe.max_buckets > 1 and recipe.router_given:
        notes.append(f"{recipe.router} does not look at buckets: all engines have one size, and serve all lengths")
        recipe = recipe.model_copy(update={"max_buckets": 1})
    return recipe, policy


def _recipe(request: Path | None, max_context: int, framework: str | None, notes: list[str]) -> Recipe:
    framework_named(framework)  # an unknown name is refused as the option's, not as a key of the file
    changes = {} if framework is None else {"framework": framework}
    if request is not None:
        return load_recipe(request, changes)
    notes.append(f"no --request: 512 trajectories a step, 16 a prompt, up to {max_context:,} tokens, asynchronous")
    return Recipe(batch=512, samples_per_prompt=16, max_length=max_context, framework=framework)
