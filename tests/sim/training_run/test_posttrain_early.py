"""Training that begins with the groups that are complete, and generation that keeps to its concurrency."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from posttrain_cases import (
    LONGEST,
    Timetable,
    agents,
    cost_of,
    layout_of,
    plan_of,
    recipe_of,
    run,
    single_turns,
    turn_ticks,
)

from libra.plan.options.cluster_request import ClusterRequest
from libra.route.baselines import LeastLoaded
from libra.route.policy import Fleet, Placement, ToolReturn, TurnRequest
from libra.sim.clock import seconds
from libra.sim.training_run.system import System
from libra.sim.training_run.trainer import TrainingPrice
from libra.trajectory import Trajectory


def system(staleness: int, *, changing: bool = False, **recipe: Any) -> System:
    wanted = recipe_of(16, 4, staleness=staleness, mode="async" if staleness else "sync", **recipe)
    first = plan_of(wanted, layout_of(2), [(1, 3, 1000), (2, 1, LONGEST)])
    second = plan_of(wanted, layout_of(4), [(1, 2, 1000), (2, 1, LONGEST)], placed=first.placement)
    replan = (lambda: Timetable({1: second, 3: first})) if changing else None
    return System("system", first, LeastLoaded, replan)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 3), st.integers(0, 99), st.booleans())
def test_every_trajectory_is_trained_on_once_and_in_time(staleness: int, seed: int, changing: bool) -> None:
    steps, episodes = 6, agents(4, seed)
    outcome = run(system(staleness, changing=changing, early_gradients=True), episodes, steps)
    assert [step.version for step in outcome.steps] == list(range(1, steps + 1))
    assert all(step.trajectories == 16 and step.worst_staleness <= staleness for step in outcome.steps)
    assert outcome.generated_tokens == sum(
        trajectory.generated_tokens for number in range(steps * 4) for trajectory in episodes.group(number, 0)
    )
    end = 0.0
    for step in outcome.steps:
        # What is not training is waiting: there is nothing else between two steps.
        assert step.ended - end == pytest.approx(step.waited + step.training)
        assert end <= step.started + 1e-9
        end = step.ended


def test_only_the_last_part_follows_the_last_trajectory() -> None:
    """Two groups of one sample each, alone on their engines: the short one is trained on while the long one runs."""
    recipe = recipe_of(2, 1, mode="sync", early_gradients=True)
    plan = plan_of(recipe, layout_of(1), [(1, 2, LONGEST)])
    lengths = {0: 50, 1: 4000}
    outcome = run(System("early", plan, LeastLoaded), single_turns(lambda number, sample: lengths[number]), 1)
    request = plan.request
    assert isinstance(request, ClusterRequest) and plan.layout is not None
    price = TrainingPrice(request.model, recipe, request.cluster.nodes[0])
    short, long = (seconds(turn_ticks(cost_of(plan), 100, tokens)) for tokens in lengths.values())
    first = price.seconds([150], plan.layout, update=False)
    last = price.seconds([4100], plan.layout)
    assert short + first < long, "the case is meant to have time for the first part"
    (step,) = outcome.steps
    assert step.started == pytest.approx(short)
    assert step.training == pytest.approx(first + last)
    assert step.ended == pytest.approx(long + last)
    assert step.waited == pytest.approx(short + (long - short - first))


def test_without_the_update_a_part_costs_as_much_less() -> None:
    recipe = recipe_of(16, 4)
    plan = plan_of(recipe, layout_of(2), [(1, 1, LONGEST)])
    request = plan.request
    assert isinstance(request, ClusterRequest) and plan.layout is not None
    price = TrainingPrice(request.model, recipe, request.cluster.nodes[0])
    one, two = ([500] * count for count in (4, 8))
    update = price.seconds(one, plan.layout) - price.seconds(one, plan.layout, update=False)
    assert update > 0
    assert price.seconds(two, plan.layout) - price.seconds(two, plan.layout, update=False) == pytest.approx(update)


def test_a_plan_for_early_training_waits_for_its_tail_only() -> None:
    whole, early = (
        plan_of(recipe_of(16, 4, staleness=1, early_gradients=early), layout_of(2), [(1, 2, LONGEST)])
        for early in (False, True)
    )
    assert early.predicted.training == whole.predicted.training
    assert early.predicted.latency < whole.predicted.latency


class Counting(LeastLoaded):
    """Knows how many trajectories are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.most = 0

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        self.live[request.trajectory_id] = 1
        self.most = max(self.most, self.live.total())
        return super().place(request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        assert self.live[request.trajectory_id]
        return super().tool_returned(request, returned, fleet)

    def finished(self, trajectory: Trajectory) -> None:
        del self.live[trajectory.id]
        super().finished(trajectory)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("concurrency", "most"), [(4, 4), (10, 10), (32, 32), (None, 48), (1000, 48)])
def test_no_more_trajectories_are_under_way_than_allowed(concurrency: int | None, most: int, early: bool) -> None:
    made: list[Counting] = []
    tried = system(2, concurrency=concurrency, early_gradients=early)

    def route() -> Counting:
        made.append(Counting())
        return made[-1]

    outcome = run(System("capped", tried.plan, route), agents(4), 5)
    assert len(outcome.steps) == 5
    assert made[0].most == most
