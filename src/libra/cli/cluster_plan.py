"""Plans of clusters of GPUs, from the files and options of `libra plan`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from libra.choose.choice import ChoiceProgress, choose_plan
from libra.choose.effort import Effort
from libra.choose.offers import Comparison, Job, compare_offers
from libra.cli.output import reading, told_before
from libra.config.frameworks import framework_named
from libra.config.recipe import Recipe, load_recipe
from libra.config.rooms import offered
from libra.cost.quantization import rollout_quantization
from libra.cost.sources.profiles import engine_profiles
from libra.cost.unmeasured import unmeasured
from libra.hardware.cluster import Cluster
from libra.hardware.cluster_file import load_cluster
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.plan.explain.what_if import assume
from libra.plan.offline import LogEvidence, gather_workload
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.menu import LendingPool
from libra.plan.plan import Plan, Solver, solver_named
from libra.plan.planner import Planner
from libra.report.live import SimulationProgress
from libra.route.custom import load_policy, looks_at_buckets
from libra.route.policy import Policy
from libra.trajectory import Trajectory, read_trajectories, read_workload


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Files and options of `libra plan --model`, other than the cluster. `simulated` has seconds, processes and seed of
    the comparison by simulation; None: no comparison.
    """

    log: Path
    model: str
    request: Path | None
    profile: str
    host: str
    truncate: bool
    longest_tool_call: float | None
    solver: Solver
    router: str | None
    framework: str | None
    simulated: tuple[float, int | None, int] | None


def plan_cluster(where: Path, what_if: list[str], inputs: PlanInputs, notes: list[str]) -> tuple[Plan, LogEvidence]:
    """Plan the cluster in the file `where`; returns the plan and the statistics of the log."""
    cluster, shape = load_cluster(where), load_model(inputs.model, notes.append)
    recipe = _recipe(inputs.request, shape.max_context, inputs.framework, notes)
    lenders: tuple[LendingPool, ...] = tuple(it for read in offered("lenders") for it in read(where, cluster))
    notes += [
        f"{pool.name} serves users and lends no GPUs, since it has no key `lends`"
        for pool in cluster.serving
        if not pool.lends
    ]
    cluster, recipe = assume(cluster, recipe, what_if)
    recipe, policy, evidence = _gathered(inputs, shape, recipe, notes)
    profiles = engine_profiles(cluster, shape, recipe, inputs.profile, notes.append, inputs.host)
    left = {pool.name: pool.nodes for pool in cluster.serving}
    lenders = tuple(lender for lender in lenders if lender.pool in left)
    lending = Cluster(tuple(left[lender.pool] for lender in lenders)) if lenders else None
    lent = (
        () if lending is None else engine_profiles(lending, shape, recipe, inputs.profile, lambda _: None, inputs.host)
    )
    planner = Planner(cluster, shape, recipe, profiles, lenders, lent)
    if inputs.simulated is None:
        return planner.plan(evidence.tracker, solver=inputs.solver), evidence
    with SimulationProgress(sys.stderr) as shown:
        request = planner.request(evidence.tracker)
        return _simulated(request, evidence, policy, inputs.solver, inputs.simulated, shown), evidence


def compare_clusters(
    clusters: Sequence[Cluster], job: Job, what_if: list[str], inputs: PlanInputs, notes: list[str]
) -> Comparison:
    """Plan each cluster for the same job, and compare the plans."""
    shape = load_model(inputs.model, notes.append)
    recipe = _recipe(inputs.request, shape.max_context, inputs.framework, notes)
    changed, recipe = assume(clusters[0], recipe, what_if)
    if changed != clusters[0]:
        raise ValueError("--what-if cannot change nodes or GPUs with --compare: name them in --compare")
    recipe, _, evidence = _gathered(inputs, shape, recipe, notes)
    told = set[str]()

    def planner(cluster: Cluster) -> Planner:
        name = cluster.nodes[0].name

        def note(text: str) -> None:
            if name not in told:
                notes.append(f"{name}: {text}")

        profiles = engine_profiles(cluster, shape, recipe, inputs.profile, note, inputs.host)
        told.add(name)
        return Planner(cluster, shape, recipe, profiles)

    with SimulationProgress(sys.stderr) as shown:

        def rehearsed(cluster: Cluster) -> Plan:
            assert inputs.simulated is not None
            request = planner(cluster).request(evidence.tracker)
            fresh = load_policy(recipe.router)  # an untrained policy
            return _simulated(request, evidence, fresh, inputs.solver, inputs.simulated, shown)

        def planned(cluster: Cluster) -> Plan:
            return planner(cluster).plan(evidence.tracker, solver=inputs.solver)

        return compare_offers(clusters, job, planned, None if inputs.simulated is None else rehearsed, shown.tell)


def _gathered(
    inputs: PlanInputs, shape: ModelSpec, recipe: Recipe, notes: list[str]
) -> tuple[Recipe, Policy, LogEvidence]:
    """The recipe with the chosen router, the router's policy, and the statistics of the log."""
    stored = rollout_quantization(recipe).note(shape)
    notes += [it for it in (stored, unmeasured(shape)) if it is not None]
    recipe, policy = _routed(recipe, inputs.router, notes)
    log = inputs.log
    evidence = gather_workload(
        recipe,
        _read(log, read_workload(log, recipe.max_length, inputs.truncate, notes.append)),
        inputs.longest_tool_call,
    )
    if inputs.truncate:
        cut = sum(
            trajectory.peak_context > recipe.max_length
            for trajectory in _read(log, read_trajectories(log, told_before))
        )
        notes.append(
            f"{cut:,} of {evidence.finished + evidence.unfinished:,} trajectories cut at {recipe.max_length:,}"
        )
    return recipe, policy, evidence


def _read(log: Path, trajectories: Iterator[Trajectory]) -> Iterator[Trajectory]:
    return reading(log, trajectories, "trajectories")


def _simulated(
    request: ClusterRequest,
    evidence: LogEvidence,
    policy: Policy,
    solver: Solver,
    simulated: tuple[float, int | None, int],
    shown: SimulationProgress,
) -> Plan:
    seconds, jobs, seed = simulated
    effort = Effort(seconds, len(os.sched_getaffinity(0)) if jobs is None else jobs, seed)

    def tell(moment: ChoiceProgress) -> None:
        shown.tell(f"{moment.words}: {moment.done} of {moment.of}" if moment.of else moment.words)

    return choose_plan(request, evidence.recent, router=policy, effort=effort, solved=solver_named(solver), tell=tell)


def _routed(recipe: Recipe, router: str | None, notes: list[str]) -> tuple[Recipe, Policy]:
    """The recipe with `router`, if given, and its policy. A policy that ignores buckets gets one engine size."""
    if router is not None:
        recipe = recipe.model_copy(update={"router": router})
    policy = load_policy(recipe.router)
    if not looks_at_buckets(policy) and recipe.max_buckets > 1 and recipe.router_given:
        notes.append(f"{recipe.router} ignores buckets: all engines have one size, and serve all lengths")
        recipe = recipe.model_copy(update={"max_buckets": 1})
    return recipe, policy


def _recipe(request: Path | None, max_context: int, framework: str | None, notes: list[str]) -> Recipe:
    framework_named(framework)  # the error for an unknown name must name the option, not a key of the file
    changes = {} if framework is None else {"framework": framework}
    if request is not None:
        return load_recipe(request, changes)
    notes.append(
        f"no --request: assumed 512 trajectories per step, 16 per prompt, up to {max_context:,} tokens, asynchronous"
    )
    return Recipe(batch=512, samples_per_prompt=16, max_length=max_context, framework=framework)
