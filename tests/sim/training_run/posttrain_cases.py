"""Small post-training runs: plans made by hand, episodes by a rule, plan changes by a timetable, and clusters that keep
what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
from oracles.small_cluster import CLASSES, QWEN_06B

from libra.config.recipe import Recipe
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.parallel import ParallelLayout
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.price import solution, training_option
from libra.plan.placement import DeviceGroup
from libra.plan.plan import Plan, answer
from libra.plan.planner import rooflines
from libra.route.admission import Admission
from libra.sim import cluster as sim_cluster
from libra.sim.clock import ticks
from libra.sim.engine.iteration_cost import DecodeBatch, IterationCost
from libra.sim.engine.messages import Iteration
from libra.sim.planned_engines import planned_engines
from libra.sim.training_run import loop
from libra.sim.training_run.episodes import Episodes
from libra.sim.training_run.outcome import SimulatedRun
from libra.sim.training_run.system import Moment, System
from libra.sim.training_run.trainer import TrainingPrice
from libra.trajectory import Trajectory, Turn

ONE_NODE = Cluster((NodeClass("a800", 1, 8, GPUS["A800"], intra_bandwidth=200e9, inter_bandwidth=25e9),))
TWO_NODES = Cluster((NodeClass("a800", 2, 8, GPUS["A800"], intra_bandwidth=200e9, inter_bandwidth=25e9),))
LONGEST = 8192  # tokens


def recipe_of(batch: int, samples: int, **others: Any) -> Recipe:
    return Recipe(batch=batch, samples_per_prompt=samples, max_length=LONGEST, **others)


def layout_of(dp: int, *, tp: int = 1) -> ParallelLayout:
    return ParallelLayout(tp, 1, dp, 1, 1, 8192, "none", "zero1", False)


def plan_of(
    recipe: Recipe,
    layout: ParallelLayout,
    buckets: Sequence[tuple[int, int, int]],  # tensor-parallel degree, engines, longest final context
    *,
    cluster: Cluster = ONE_NODE,
    placed: Sequence[DeviceGroup] = (),
    trains: str = "a800",
) -> Plan:
    """The plan with these trainers and engines, whatever would be faster."""
    profiles = rooflines(cluster, QWEN_06B, recipe)
    request = ClusterRequest(cluster, QWEN_06B, recipe, CLASSES, profiles, None, ((trains, layout),))
    menu = request.menu()
    made, above = [], 0
    for tp, engines, up_to in buckets:
        made.append(Bucket(f"a800/tp{tp}", engines, above, up_to))
        above = up_to
    allocation = Allocation(layout.dp, tuple(made), f"{trains}/{layout.family}")
    return answer(request, menu, solution(menu.problem, allocation), placed)


@dataclass(frozen=True)
class Ruled:
    """Episodes whose prompt and turns a function of (group, sample) gives."""

    samples_per_prompt: int
    rule: Callable[[int, int], tuple[int, tuple[Turn, ...]]]
    max_context: int = LONGEST

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        made = []
        for sample in range(self.samples_per_prompt):
            prompt, turns = self.rule(number, sample)
            made.append(Trajectory(f"{number}/{sample}", f"p{number}", "t", prompt, turns, None, version, True))
        return tuple(made)


def single_turns(tokens: Callable[[int, int], int], *, samples: int = 1, prompt: int = 100) -> Ruled:
    """One turn of so many tokens each."""
    return Ruled(samples, lambda number, sample: (prompt, (Turn(tokens(number, sample), None, None, 0),)))


def agents(samples: int, seed: int = 0, *, mean: float = 250.0, turns: int = 5) -> Ruled:
    """Some turns with tools between them; lengths are as unequal as those of agents."""

    def rule(number: int, sample: int) -> tuple[int, tuple[Turn, ...]]:
        random = np.random.default_rng((seed, number, sample))
        count = int(random.integers(1, turns + 1))
        made = []
        for turn in range(count):
            last = turn == count - 1
            tokens = min(1200, 1 + int(mean * random.lognormal(-0.3, 0.8)))
            if last:
                made.append(Turn(tokens, None, None, 0))
            else:
                tool = None if random.random() < 0.2 else float(random.exponential(0.4))
                made.append(Turn(tokens, "search", "ok", int(random.integers(0, 150)), tool))
        return 64 + 10 * (number % 7), tuple(made)

    return Ruled(samples, rule)


@dataclass
class Timetable:
    """A `Replan` that proposes a plan at some versions, and remembers what it was told."""

    plans: Mapping[int, Plan]
    period: int = 1
    moments: list[Moment] = field(default_factory=list)

    def decide(self, moment: Moment) -> Plan | None:
        self.moments.append(moment)
        return self.plans.get(moment.version)


Batch = list[tuple[str, list[Trajectory]]]  # groups by name


@dataclass
class Seen:
    """The cluster of a run, with all its requests; its iterations, and the batches that were trained on."""

    iterations: list[Iteration] = field(default_factory=list)
    clusters: list[sim_cluster.SimCluster] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    @property
    def cluster(self) -> sim_cluster.SimCluster:
        (cluster,) = self.clusters
        return cluster


@contextmanager
def seeing() -> Iterator[Seen]:
    """The loop's cluster keeps its requests and tells its iterations, and batches are noted: all goes on as without."""
    seen = Seen()

    def kept(*args: Any, **others: Any) -> sim_cluster.SimCluster:
        seen.clusters.append(sim_cluster.SimCluster(*args, **{**others, "keep": True, "trace": seen.iterations.append}))
        return seen.clusters[-1]

    class Noted(Admission[Trajectory]):
        def take(self) -> Batch:
            batch = super().take()
            seen.batches.append(batch)
            return batch

    with patch.object(loop, "SimCluster", kept), patch.object(loop, "Admission", Noted):
        yield seen


def run(system: System, episodes: Episodes, steps: int, **others: Any) -> SimulatedRun:
    return loop.simulate_posttraining(system, episodes, steps, **others)


def costs_of(plan: Plan, lengths: Sequence[int]) -> tuple[int, int]:
    """Ticks of an optimiser step over trajectories of these final contexts, and of publishing its weights."""
    request = plan.request
    assert isinstance(request, ClusterRequest) and plan.layout is not None
    nodes = request.cluster.node_class(next(group.pool for group in plan.placement if group.role == "train"))
    needed = TrainingPrice(request.model, request.recipe, nodes).seconds(lengths, plan.layout)
    option = training_option(request.menu().problem, plan.allocation)
    assert option is not None
    return ticks(needed), ticks(option.publish)


def cost_of(plan: Plan) -> IterationCost:
    """Of the plan's first engine."""
    return planned_engines(plan)[0].cost


def turn_ticks(cost: IterationCost, prompt: int, generated: int, cached: int = 0) -> int:
    """A turn with an engine to itself: what is not cached of its prompt is computed with the first token, each further
    token attends to all before it and to itself."""
    now = cost.mixed(DecodeBatch(0), 0, [(prompt - cached, cached)])
    for context in range(prompt + 1, prompt + generated):
        base, slope, _ = cost.line(DecodeBatch(1), context)
        now += base + slope * context
    return now
