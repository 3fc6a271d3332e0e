"""Who knows every trajectory of a run in advance.

Invariant: what is foretold is what the run will draw, as far as it does not depend on when a group is started: the
version a group starts under is foretold as the one that the pipeline, when full, would start it under.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from libra.plan.plan import Plan
from libra.plan.planner import Planner
from libra.plan.replanner import Replanner
from libra.route.oracle import Oracle
from libra.sim.posttrain.episodes import Episodes
from libra.sim.posttrain.loop import simulate_posttraining
from libra.sim.posttrain.rehearsal import STEPS
from libra.sim.posttrain.system import Moment, System
from libra.trajectory import Trajectory


@dataclass(slots=True)
class Foretold:
    """Episodes that are known as soon as they are drawn, from the `first` group on, by the names they have in a run."""

    episodes: Episodes
    first: int = 0  # number of the group that is asked for as 0
    version: int = 0  # likewise
    known: dict[str, Trajectory] = field(default_factory=dict)  # by id

    @property
    def samples_per_prompt(self) -> int:
        return self.episodes.samples_per_prompt

    @property
    def max_context(self) -> int:
        return self.episodes.max_context

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        drawn = self.episodes.group(self.first + number, self.version + version)
        self.known.update((trajectory.id, trajectory) for trajectory in drawn)
        return drawn

    def describe(self) -> dict[str, Any]:
        return {"name": "foretold", "first": self.first, "version": self.version, "episodes": self.episodes.describe()}


@dataclass(slots=True)
class Foresight:
    """Plans for the trajectories of the steps to come, in rehearsals with these very trajectories."""

    episodes: Episodes
    planner: Planner
    system: System  # as it runs, but for plan and router
    period: int  # steps

    def plan(self, current: Plan | None, version: int) -> Plan | None:
        """The plan to go over to at this version; None: the current one is best."""
        recipe = self.planner.recipe
        ahead = version + 1 + recipe.staleness if current is not None else 0
        first = ahead * recipe.prompts
        tracker = self.planner.tracker()
        for number in range(self.period * recipe.prompts):
            for trajectory in self.episodes.group(first + number, version + number // recipe.prompts):
                tracker.observe(trajectory)

        def check(plans: Sequence[Plan], mean_context: float) -> list[float]:
            return [self._seconds(plan, first, version) for plan in plans]

        replanner = Replanner(
            self.planner, current, period=self.period, tracker=tracker, switch=self.system.switch, check=check
        )
        return replanner.plan if replanner.step((), ()).taken else None

    def _seconds(self, plan: Plan, first: int, version: int) -> float:
        """Of a step, once the pipeline is full."""
        filling = 1 + self.planner.recipe.staleness
        foretold = Foretold(self.episodes, first, version)
        system = replace(self.system, plan=plan, route=lambda: Oracle(foretold.known), replan=None)
        steps = simulate_posttraining(system, foretold, filling + STEPS).steps
        return (steps[-1].ended - steps[filling - 1].ended) / STEPS


@dataclass(slots=True)
class Foreseeing:
    """The `Replan` of who has foresight."""

    foresight: Foresight
    plan: Plan

    @property
    def period(self) -> int:
        return self.foresight.period

    def decide(self, moment: Moment) -> Plan | None:
        plan = self.foresight.plan(self.plan, moment.version)
        if plan is not None:
            self.plan = plan
        return plan
