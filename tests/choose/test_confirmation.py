"""A change of plans that is tried in simulation: by itself, and as a replanner asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_cluster import CLUSTER, QWEN_06B, RECIPE, trajectories

from libra.choose.confirmation import simulated_gain
from libra.choose.effort import Effort
from libra.cost.device import SwitchCost
from libra.plan.options.price import solution
from libra.plan.plan import Plan, answer, make_plan
from libra.plan.planner import Planner
from libra.plan.replanner import Replanner
from libra.plan.simulated import SimulatedGain
from libra.sim.of_plan import simulate_run

FREE = SwitchCost(0.0, 0.0, 0.0)
PLANNER = Planner(CLUSTER, QWEN_06B, RECIPE)
LOG = tuple(trajectories(0, 6, 48))


def plans() -> tuple[Plan, Plan]:
    """One with a single engine, and the best."""
    tracker = PLANNER.tracker(LOG)
    request = PLANNER.request(tracker)
    best = make_plan(request)
    bucket = max(best.allocation.buckets, key=lambda it: it.up_to)
    menu = request.menu()
    alone = replace(best.allocation, buckets=(replace(bucket, engines=1, above=0),))
    return answer(request, menu, solution(menu.problem, alone)), best


def test_the_gain_is_weighed_from_prices_and_whole_runs() -> None:
    slow, fast = plans()
    gain = simulated_gain(slow, fast, LOG)
    each = [
        simulate_run(plan, LOG, 2 + gain.steps, "cmlfq", learned=LOG).settled_step_seconds(2) for plan in (slow, fast)
    ]
    between = sorted([each[0] - each[1], slow.predicted.step - fast.predicted.step])
    assert between[0] <= gain.seconds <= between[1]
    assert gain.seconds > gain.error > 0
    back = simulated_gain(fast, slow, LOG)
    assert back.seconds < -back.error


def test_pairs_that_agree_by_chance_leave_a_doubt() -> None:
    """Pairs of a plan with itself have no variance at all."""
    _, fast = plans()
    few, many = (simulated_gain(fast, fast, LOG, effort=Effort(samples=most)) for most in (3, 12))
    assert few.seconds == many.seconds == 0.0
    assert few.error > many.error > 0
    assert (few.steps, many.steps) == (6, 24)


def test_the_current_plan_is_priced_for_the_lengths_of_the_proposed_one() -> None:
    """An older prediction of it does not matter."""
    slow, fast = plans()
    effort = Effort(samples=1)
    wanted = simulated_gain(slow, fast, LOG, effort=effort)
    optimistic = replace(slow, predicted=replace(slow.predicted, step=fast.predicted.step / 10))
    assert simulated_gain(optimistic, fast, LOG, effort=effort) == wanted


def test_an_effort_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="samples is 0"):
        Effort(samples=0)


@pytest.mark.parametrize(
    ("gain", "cost", "taken", "reason"),
    [
        (SimulatedGain(2.0, 1.0, 6), 0.0, True, "; simulated: 2 +- 1 s a step over 6 simulated steps"),
        (SimulatedGain(1.0, 1.0, 6), 0.0, False, "; simulation does not confirm it: 1 +- 1 s a step"),
        (SimulatedGain(-5.0, 1.0, 6), 0.0, False, "; simulation does not confirm it: -5 +- 1 s a step"),
        (SimulatedGain(1e-6, 1e-7, 6), 1e-3, False, "within 10 steps, and costs "),
    ],
)
def test_a_change_is_made_if_simulation_confirms_it(gain: SimulatedGain, cost: float, taken: bool, reason: str) -> None:
    asked: list[tuple[Plan, Plan]] = []

    def rehearsed(current: Plan, proposed: Plan, log: tuple[object, ...]) -> SimulatedGain:
        asked.append((current, proposed))
        assert len(log) == 2 * len(LOG)
        return gain

    planner = replace(PLANNER, recipe=RECIPE.model_copy(update={"batch": 1024}))
    replanner = Replanner(planner, switch=SwitchCost(cost, cost, 0.0), holds=10.0, rehearse=rehearsed)
    replanner.step(LOG, [])
    first = replanner.plan
    assert first is not None and not asked
    decision = replanner.step(trajectories(1, 40, len(LOG)), [])
    assert asked and asked[0][0] is first
    assert decision.taken == taken and reason in decision.reason
    assert (replanner.plan is asked[0][1]) == taken
