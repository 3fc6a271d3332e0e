"""A replanner that asks before it decides: about which plans, and what it makes of the answers."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from oracles.small_cluster import A800, CLUSTER, QWEN_14B
from oracles.small_cluster import RECIPE as SMALL_BATCHES

from libra.cluster import Cluster
from libra.cost.device import SwitchCost
from libra.plan.cluster_request import ClusterRequest
from libra.plan.moves import Change
from libra.plan.plan import Plan
from libra.plan.planner import CLASSES, Planner
from libra.plan.price import fits
from libra.plan.problem import Allocation
from libra.plan.recipe_tracker import recipe_tracker
from libra.plan.replanner import HALF_LIFE_STEPS, Replanner
from libra.plan.solve import solve
from libra.plan.switching import live_refill, switch_seconds
from libra.trajectory import Trajectory, Turn

RECIPE = SMALL_BATCHES.model_copy(update={"batch": 1024, "max_buckets": 3})
PLANNER = Planner(CLUSTER, QWEN_14B, RECIPE)
FREE = SwitchCost(0.0, 0.0, 0.0)


def trajectories(version: int, calls: int) -> list[Trajectory]:
    """About `calls` tool calls of 100 + 100 tokens each, as many as the recipe has room for."""
    rng = random.Random(version)
    made = []
    for number in range(256):
        turns = (Turn(100, "tool", "ok", 100, 1.0),) * min(38, max(1, round(calls * rng.lognormvariate(0, 0.4))))
        name = f"{version}.{number}"
        last = (Turn(100, None, None, 0),)
        made.append(Trajectory(name, name, "made", 200, turns + last, None, version, True))
    return made


class Asked:
    """A check that says what `seconds` does, and remembers what it was asked."""

    def __init__(self, seconds: Callable[[Plan], float]) -> None:
        self.seconds = seconds
        self.plans: list[Sequence[Plan]] = []
        self.means: list[float] = []

    def __call__(self, plans: Sequence[Plan], mean_context: float) -> list[float]:
        self.plans.append(plans)
        self.means.append(mean_context)
        return [self.seconds(plan) for plan in plans]

    @property
    def allocations(self) -> list[Allocation]:
        """What it was last asked about."""
        return [plan.allocation for plan in self.plans[-1]]


def priced(plan: Plan) -> float:
    return plan.predicted.step


def running(check: Asked, switch: SwitchCost = FREE, calls: int = 1) -> tuple[Replanner, Plan]:
    """After a first step on trajectories of about `calls` calls, for which the plan that is priced best was started."""
    check.seconds, answer = priced, check.seconds
    replanner = Replanner(PLANNER, check=check, switch=switch)
    replanner.step(trajectories(0, calls), [])
    check.seconds = answer
    assert replanner.plan is not None
    return replanner, replanner.plan


def test_it_is_asked_about_what_runs_and_the_best_plan_of_each_number_of_ranges() -> None:
    check = Asked(priced)
    replanner, runs = running(check)
    assert runs.allocation in check.allocations
    replanner.step(trajectories(1, 20), [])
    assert len(set(check.allocations)) == len(check.allocations)
    assert runs.allocation in check.allocations
    problem = check.plans[-1][0].request.menu().problem  # type: ignore[union-attr]
    for most in (1, 2):
        assert solve(replace(problem, most_buckets=most)).allocation in check.allocations
    for plan in check.plans[-1]:
        assert fits(problem, plan.allocation) is None
        assert plan.layout is not None
        assert (plan.layout.dp, plan.request) == (plan.allocation.replicas, check.plans[-1][0].request)
        assert sum(group.devices for group in plan.placement) <= CLUSTER.devices


def test_lengths_are_said_as_forecast() -> None:
    check = Asked(priced)
    tracker = recipe_tracker(RECIPE, HALF_LIFE_STEPS)
    tracker.observe_running(())
    replanner = Replanner(PLANNER, tracker=tracker, period=6, check=check)
    for version, calls in enumerate((2, 4, 8)):
        replanner.step(trajectories(version, calls), [])
        classes = tracker.forecast(3, CLASSES, RECIPE.max_length).classes
        assert check.means[-1] == pytest.approx(sum(cls.share * cls.mean_context for cls in classes))
    assert check.means == sorted(check.means)


def test_of_the_first_plans_the_fastest_is_started_whatever_prices_say() -> None:
    check = Asked(priced)
    Replanner(PLANNER, check=check).step(trajectories(0, 8), [])
    plans = check.plans[0]
    assert len(plans) > 2
    for best in plans:
        replanner = Replanner(PLANNER, check=lambda plans, _, best=best: [2.0 - (plan == best) for plan in plans])
        decision = replanner.step(trajectories(0, 8), [])
        assert replanner.plan == best
        assert (decision.taken, decision.current, decision.gain_per_step) == (True, None, None)
        assert (decision.moves, decision.cost, decision.proposed.step) == ((), 0.0, 1.0)
        assert replanner.looks[0].predicted == decision.proposed


# What runs takes 1e6 s: beside that the contexts of engines that stop are made again in no time. Lengths are uncertain
# by 8 %.
DECISIONS = [
    ("a gain", 8e5, 0.0, 1, True, "saves 2e+05 s of 1e+06 s a step"),
    ("costs less than it saves in five steps", 8e5, 0.9e6, 1, True, "1e+06 s over 5 steps, more than the 9"),
    ("costs more", 8e5, 1.1e6, 1, False, "of what was checked, the current allocation is the best"),
    ("costs less than it saves in ten steps", 8e5, 1.1e6, 2, True, "2e+06 s over 10 steps, more than the 1.1"),
    ("within what is uncertain", 9.5e5, 0.0, 1, False, "by which the tracked work is uncertain"),
    ("a loss", 1.01e6, 0.0, 1, False, "of what was checked, the current allocation is the best"),
]


@pytest.mark.parametrize(
    ("others", "start", "looks", "taken", "reason"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS]
)
def test_what_runs_stays_unless_another_plan_gains_more_than_it_costs(
    others: float, start: float, looks: int, taken: bool, reason: str
) -> None:
    """By the check what runs takes 1e6 s a step, and anything else `others`. Long trajectories give way to short ones,
    and large engines to small ones: contexts of those that stop are made again, which the change costs, too."""
    switch = SwitchCost(start, start, 0.0)
    check = Asked(lambda plan: 1e6 if plan.allocation == runs.allocation else 2e6)
    replanner, runs = running(check, switch, calls=16)
    for _ in range(looks - 1):
        assert not replanner.step([], []).taken
    check.seconds = lambda plan: 1e6 if plan.allocation == runs.allocation else others
    decision = replanner.step(trajectories(1, 1), [])
    assert (decision.taken, reason in decision.reason) == (taken, True), decision.reason
    assert decision.current is not None and replanner.plan is not None
    assert decision.current.step == 1e6
    assert decision.gain_per_step == decision.current.step - decision.proposed.step
    assert decision.horizon_steps == 5 * looks
    assert (replanner.plan.allocation != runs.allocation) == taken
    assert replanner.looks[-1].predicted == (decision.proposed if taken else decision.current)
    if taken:
        changed = {(move.kind, move.role) for move in decision.moves if isinstance(move, Change)}
        assert changed >= {("stop", "engine"), ("start", "engine")}
        request = check.plans[-1][0].request
        assert isinstance(request, ClusterRequest)
        after, problem, refill = replanner.plan.allocation, request.menu().problem, live_refill(request)
        assert decision.cost == switch_seconds(problem, runs.allocation, after, switch, refill) > start


def test_what_no_longer_fits_is_left_at_any_cost() -> None:
    _, runs = running(Asked(priced))
    smaller = Planner(Cluster((replace(A800, count=1),)), QWEN_14B, RECIPE)
    check = Asked(priced)
    replanner = Replanner(smaller, runs, check=check, switch=SwitchCost(1e6, 1e6, 0.0))
    decision = replanner.step(trajectories(0, 1), [])
    assert runs.allocation not in check.allocations
    assert (decision.taken, decision.current, decision.gain_per_step) == (True, None, None)
    assert decision.reason.startswith("the current allocation no longer fits: ")
    assert decision.moves
    assert replanner.plan is not None and replanner.plan.allocation in check.allocations


def test_the_same_answers_give_the_same_decisions() -> None:
    runs = []
    for _ in range(2):
        replanner, _ = running(Asked(lambda plan: 3.0 + plan.allocation.engines))
        replanner.step(trajectories(1, 20), [])
        runs.append(pickle.dumps((replanner.plan, replanner.looks)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("answer", [[], [1.0], [math.nan], [math.inf], [0.0], [-1.0]], ids=str)
def test_an_answer_that_is_no_seconds_of_each_plan_is_refused(answer: list[float]) -> None:
    def check(plans: Sequence[Plan], mean_context: float) -> list[float]:
        return answer if answer in ([], [1.0]) else answer * len(plans)

    replanner = Replanner(PLANNER, check=check)
    with pytest.raises(ValueError, match=r"the check says .*; give the seconds of each, finite and > 0"):
        replanner.step(trajectories(0, 8), [])
    assert (replanner.plan, replanner.looks) == (None, ())
