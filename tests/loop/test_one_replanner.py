"""A simulated and a real run, driven by the same replanner: the same observations lead to the same decisions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
from fakes.small_run import CONFIG, FIRST, PROFILE, make_observations
from oracles.small_cluster import CLUSTER, QWEN_14B, RECIPE, trajectories

from libra.cost.device import SwitchCost
from libra.exec.executor import Executor
from libra.exec.pool import WorkerPool
from libra.exec.protocols import Applied, ProcessController
from libra.loop.observations import Observations
from libra.loop.recorder import Recorder
from libra.loop.replan_controller import ReplanController
from libra.plan.allocation import Allocation
from libra.plan.decision import Decision
from libra.plan.planner import Planner
from libra.plan.price_bias import PeriodSeconds
from libra.plan.replanner import Replanner
from libra.plan.site import ClusterSite, SlotSite
from libra.plan.solution import Prediction
from libra.plan.transition import Device, Transition
from libra.sim.training_run.system import Moment, Replanning
from libra.trajectory.record import Trajectory

PLANNER = Planner(CLUSTER, QWEN_14B, RECIPE.model_copy(update={"batch": 1024}))
SWITCH = SwitchCost(engine_start=20.0, trainer_join=10.0, weight_load=0.0)
PERIOD = 2
CALLS = [1, 1, 20, 20, 3, 3, 12]  # of the trajectories that end in each period


class Taught(Replanner):
    """One that knows already how wrong prices are: the two runs measure other numbers of steps."""

    def learn(self, priced: Prediction, found: PeriodSeconds, *, untried: bool = False) -> None: ...


class ClusterObservations(Observations):
    """Those of a run whose executor has a cluster."""

    def __init__(self) -> None:
        super().__init__(CONFIG.planner, CONFIG.training, CONFIG.engines, PROFILE, 8)
        self.replanner = Taught(PLANNER, period=PERIOD)

    def site(self, devices: tuple[Device, ...], current: Allocation | None) -> SlotSite:
        return cast(SlotSite, ClusterSite(PLANNER, self.replanner.plan, SWITCH))


class ClusterExecutor:
    """Makes every transition at once."""

    def __init__(self) -> None:
        self.pool, self.made, self._allocation = WorkerPool([]), list[Transition](), cast(Allocation | None, None)

    def allocation(self) -> Allocation | None:
        return self._allocation

    def drop_rest(self, why: str) -> None: ...

    async def apply(self, transition: Transition) -> Applied:
        self.made.append(transition)
        self._allocation = transition.after
        return Applied((), None)


def simulated(periods: list[list[Trajectory]]) -> list[Decision]:
    driver = Replanning(Taught(PLANNER, period=PERIOD, switch=SWITCH), PERIOD)
    for version, finished in enumerate(periods):
        driver.decide(Moment(version * PERIOD, finished, (), 1.0))
    return [look.decision for look in driver.replanner.looks]


async def real(periods: list[list[Trajectory]], directory: Path) -> tuple[list[Decision], list[Transition]]:
    observations, executor, recorder = ClusterObservations(), ClusterExecutor(), Recorder(directory, 0.0)
    recorder.begin()
    controller = ReplanController(
        cast(Executor[ProcessController], executor),
        observations,
        recorder,
        lambda text: None,
        FIRST,
        steps=10_000,
        period=PERIOD,
        seed=0,
        adaptive=True,
        first_period=0,
    )
    controller.begin(0)
    step = 0
    for finished in periods:
        observations.replanner.observe(finished)
        looks = len(observations.replanner.looks)
        while len(observations.replanner.looks) == looks:  # of some boundary a change is only told
            step += 1
            controller.stepped(step, 1.0)
            controller.at_boundary()
            if controller._task is not None:
                await asyncio.wait([controller._task])
    await controller.finish()
    recorder.close()
    return [look.decision for look in observations.replanner.looks], executor.made


@pytest.mark.parametrize("calls", [CALLS, CALLS[::-1], [4] * 4], ids=["longer", "shorter", "as long"])
def test_a_simulated_and_a_real_run_decide_alike(calls: list[int], tmp_path: Path) -> None:
    periods = [trajectories(PERIOD * version, count) for version, count in enumerate(calls)]
    decisions = simulated(periods)
    assert len(decisions) == len(calls)
    decided, made = asyncio.run(real(periods, tmp_path))
    assert decided == decisions
    assert made == [decision.transition for decision in decisions if decision.taken]
    assert len(made) > 1 or calls != CALLS


def test_a_first_allocation_need_not_prove_how_long_plans_hold() -> None:
    """In a run it is the user's: until something has changed, a plan is taken to hold as long as the file says."""
    observations = make_observations()
    observations.replanner.observe(trajectories(0, 1))
    site = ClusterSite(PLANNER)
    assert observations.replanner.outlook(site).horizon_steps == CONFIG.planner.horizon == 100
    assert observations.replanner.outlook(site, steps_left=7).horizon_steps == 7
    assert Replanner(PLANNER, period=3, holds=50.0, tracker=observations.tracker).outlook(site).horizon_steps == 50
