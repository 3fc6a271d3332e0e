"""Plans for one cluster, model and recipe: the interface for training loops.

Invariant: a planner is a value without state, so threads may share it, and equal arguments give equal plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libra.config.recipe import Recipe
from libra.cost.engine_memory import BLOCK
from libra.cost.grid import EngineProfile
from libra.cost.sources.roofline import node_roofline
from libra.hardware.cluster import Cluster
from libra.hardware.model import ModelSpec
from libra.lengths import LengthTracker, TrajectoryClass
from libra.plan.allocation import Allocation
from libra.plan.options.cluster_request import ClusterRequest, Held
from libra.plan.options.menu import LendingPool
from libra.plan.plan import Plan, Solver, make_plan
from libra.plan.problem import Problem
from libra.trajectory import Trajectory

CLASSES = 24  # classes of trajectories that a plan distinguishes
PLANNER_HALF_LIFE_STEPS = 4.0  # default half-life of a tracker to plan from, in optimiser steps

Statistics = LengthTracker | Sequence[TrajectoryClass]


@dataclass(frozen=True, slots=True)
class Planner:
    """`Planner(cluster, model, recipe).plan(tracker)` is the best division of the cluster for the tracked lengths.

    `profiles` has the engine times of each class of nodes; the default is the roofline of each GPU.
    `libra.cost.sources.profiles.engine_profiles` gives better profiles.
    """

    cluster: Cluster
    model: ModelSpec
    recipe: Recipe
    profiles: tuple[EngineProfile, ...] | None = None
    lenders: tuple[LendingPool, ...] = ()  # on serving pools of the cluster
    lent_profiles: tuple[EngineProfile, ...] | None = None  # one for each lender; None: rooflines

    def tracker(
        self, seen: Iterable[Trajectory] = (), half_life_steps: float = PLANNER_HALF_LIFE_STEPS
    ) -> LengthTracker:
        """A tracker with the recipe's settings that has observed the finished trajectories `seen`."""
        tracker = recipe_tracker(self.recipe, half_life_steps)
        for trajectory in seen:
            tracker.observe(trajectory)
        return tracker

    def plan(self, statistics: Statistics, current: Plan | None = None, solver: Solver = "cp-sat") -> Plan:
        """The plan with the shortest optimiser step; among equal plans, the closest to `current`.

        Raises `InfeasiblePlanError` if no plan exists, and ValueError if the statistics are empty or do not fit the
        recipe.
        """
        request = self.request(statistics, *what_runs(current))
        return make_plan(request, placed=() if current is None else current.placement, solver=solver)

    def problem(self, statistics: Statistics, current: Allocation | None = None) -> Problem:
        """The priced problem that `plan` solves."""
        return self.request(statistics, current).menu().problem

    def request(self, statistics: Statistics, current: Allocation | None = None, held: Held = ()) -> ClusterRequest:
        """The planning request, which a plan embeds. `held` layouts are on the menu even if others are faster."""
        classes = statistics.classes(CLASSES) if isinstance(statistics, LengthTracker) else tuple(statistics)
        profiles = self.profiles if self.profiles is not None else rooflines(self.cluster, self.model, self.recipe)
        lent = self.lent_profiles
        if lent is None:
            on = (self.cluster.serving_pool(lender.pool).nodes for lender in self.lenders)
            lent = tuple(node_roofline(nodes, self.model, self.recipe) for nodes in on)
        return ClusterRequest(
            self.cluster, self.model, self.recipe, classes, profiles, current, held, self.lenders, lent
        )


def what_runs(plan: Plan | None) -> tuple[Allocation | None, Held]:
    """The allocation of a plan, and the pool and layout in which the plan trains; empty without a layout."""
    if plan is None:
        return None, ()
    pools = [group.pool for group in plan.placement if group.role == "train"]
    return plan.allocation, () if plan.layout is None else ((pools[0], plan.layout),)


def recipe_tracker(recipe: Recipe, half_life_steps: float) -> LengthTracker:
    """An empty tracker for the recipe. A trajectory's weight halves every `half_life_steps` optimiser steps. KV has a
    GPU engine's block size, and tool returns of unknown duration take the recipe's seconds.
    """
    return LengthTracker(
        half_life_steps * recipe.batch,
        block_tokens=BLOCK,
        unknown_tool_seconds=recipe.tool_seconds_if_unknown,
    )


def rooflines(cluster: Cluster, model: ModelSpec, recipe: Recipe) -> tuple[EngineProfile, ...]:
    """The roofline of each class of nodes."""
    return tuple(node_roofline(nodes, model, recipe) for nodes in cluster.nodes)
