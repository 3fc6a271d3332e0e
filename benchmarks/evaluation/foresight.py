"""A planner that knows every trajectory of a run in advance, beside the policy that does (`tests.oracles`).

Invariant: what is foretold to the planner is what the run will draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libra import Plan, Planner, Replanner, Trajectory
from libra.cost.device import SwitchCost
from libra.sim.training_run.episodes import Episodes
from libra.sim.training_run.system import Moment
from tests.oracles.workloads.drifting_tasks import Around

_ALL_ALIKE = 1e6  # steps after which a trajectory counts half as much: those of a period all count


@dataclass(slots=True)
class Foretold(Around):
    """Episodes that are known as soon as they are drawn."""

    episodes: Episodes
    known: dict[str, Trajectory] = field(default_factory=dict)  # by id

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        drawn = self.episodes.group(number, version)
        self.known.update((trajectory.id, trajectory) for trajectory in drawn)
        return drawn


@dataclass(slots=True)
class Foresight:
    """Plans for the steps to come, by a replanner that observes the trajectories of those steps in advance."""

    episodes: Episodes
    planner: Planner
    switch: SwitchCost
    period: int  # steps

    def plan(self, current: Plan | None, version: int) -> Plan | None:
        """The plan to go over to at this version; None: the current one is best."""
        recipe = self.planner.recipe
        # As this version was made, and the one before it is in use, the groups of `staleness` steps more have started.
        first = 0 if current is None else (version + recipe.staleness) * recipe.prompts
        tracker = self.planner.tracker(half_life_steps=_ALL_ALIKE)
        for number in range(self.period * recipe.prompts):
            # All of one version: there is no trend to follow further, as what comes is known.
            for trajectory in self.episodes.group(first + number, version):
                tracker.observe(trajectory)
        replanner = Replanner(self.planner, current, period=self.period, tracker=tracker, switch=self.switch)
        return replanner.plan if replanner.step((), ()).taken else None


@dataclass(slots=True)
class Foreseeing:
    """The `Replan` of a system with foresight."""

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
