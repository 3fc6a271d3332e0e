"""Comparison of a plan with a team's own split of its GPUs: the step of each, and the side that waits.

Invariant: the split gets the best engines and layout for its two numbers, and is priced like the plan. So only the
split causes a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from libra.config.yaml_file import ConfigError
from libra.hardware.cluster import Cluster, with_gpus
from libra.plan.allocation import Allocation
from libra.plan.model.solve import solve
from libra.plan.options.price import devices_used, own_training
from libra.plan.plan import Plan
from libra.plan.problem import InfeasiblePlanError, Problem
from libra.plan.solution import Bottleneck, Prediction

_KEYS = ("train", "generate")


@dataclass(frozen=True, slots=True)
class OwnSplit:
    """GPUs that train and GPUs that generate."""

    train: int
    generate: int


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step of one split. Both waits are shares of the step."""

    train: int  # GPUs
    generate: int  # GPUs that have an engine
    layout: str
    engines: tuple[tuple[str, int], ...]  # shape, count
    step: float  # seconds, predicted
    bottleneck: Bottleneck
    trainers_wait: float
    engines_wait: float  # of the busiest bucket's engines; other engines wait longer


@dataclass(frozen=True, slots=True)
class Against:
    """The best step of a split, and the step of the plan."""

    split: SplitStep
    plan: SplitStep
    idle: int  # GPUs that the split assigns to generation and no engine uses

    @property
    def longer(self) -> float:
        """Share of the plan's step by which the split's step is longer."""
        return self.split.step / self.plan.step - 1


def parse_split(text: str) -> OwnSplit:
    """Parse text such as `train=64,generate=192`. Raises `ConfigError` unless both counts are positive whole
    numbers.
    """
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if given.keys() != set(_KEYS) or not all(count.isdecimal() and 0 < int(count) < 10**9 for count in given.values()):
        raise ConfigError(f"--against {text}: give GPUs of both sides, such as train=64,generate=192")
    return OwnSplit(*(int(given[key]) for key in _KEYS))


def against(plan: Plan, own: OwnSplit) -> Against:
    """Compare the plan with the best plan for its request that trains on `own.train` GPUs and generates on
    `own.generate`.

    Raises `ConfigError` for a colocated plan, for GPUs that are not whole nodes, and if no layout trains on `own.train`
    GPUs; ValueError for the plan of a run on one machine; `InfeasiblePlanError` if no engine can hold the longest
    context.
    """
    request = plan.of_cluster
    if request.recipe.mode == "colocated":
        raise ConfigError("--against: in a colocated plan, all GPUs train and generate: give a plan of another mode")
    cluster = _cluster_of(request.cluster, own)
    profiles = {nodes.name: it for nodes, it in zip(request.cluster.nodes, request.profiles, strict=True)}
    known = tuple(profiles[nodes.name] for nodes in cluster.nodes)
    problem = replace(request, cluster=cluster, profiles=known, current=None, held=()).menu().problem
    options = tuple(option for option in problem.training if option.devices == own.train)
    if not options:
        fewer = [option.devices for option in problem.training if option.devices < own.train]
        more = [option.devices for option in problem.training if option.devices > own.train]
        nearest = " or ".join(f"{count:,}" for count in (*sorted(fewer)[-1:], *sorted(more)[:1]))
        raise ConfigError(f"--against: no layout trains on {own.train:,} GPUs; give {nearest}")
    held = replace(problem, training=options)
    try:
        found = solve(replace(held, use_all_devices=True))
    except InfeasiblePlanError:  # the engines do not fill the GPUs, so some stay idle
        found = solve(held)
    split = _step(problem, found.allocation, found.predicted)
    return Against(
        split,
        _step(request.menu().problem, plan.allocation, plan.predicted),
        idle=max(0, own.generate - split.generate),
    )


def _cluster_of(cluster: Cluster, own: OwnSplit) -> Cluster:
    """The cluster with the number of GPUs of the split."""
    wanted = own.train + own.generate
    if wanted == sum(nodes.count * nodes.gpus for nodes in cluster.nodes):
        return cluster
    try:
        return with_gpus(cluster, wanted)
    except ValueError as error:
        raise ConfigError(f"--against: {' '.join(str(error).split())}") from None


def _step(problem: Problem, allocation: Allocation, predicted: Prediction) -> SplitStep:
    used = devices_used(problem, allocation).values()

    def waits(busy: float) -> float:
        return max(0.0, 1 - busy / predicted.step) if predicted.step > 0 else 0.0

    return SplitStep(
        train=own_training(problem, allocation).devices,
        generate=sum(generating for _, generating in used),
        layout=allocation.layout,
        engines=tuple(allocation.engines_by_shape.items()),
        step=predicted.step,
        bottleneck=predicted.bottleneck,
        trainers_wait=waits(predicted.training),
        engines_wait=waits(predicted.rollout),
    )
