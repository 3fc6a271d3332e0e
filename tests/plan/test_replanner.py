"""The replanner in a training loop: what it watches, when it changes the plan, and what it keeps."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from oracles.small_cluster import CLUSTER, QWEN_14B, trajectories
from oracles.small_cluster import RECIPE as SMALL_BATCHES

from libra.cost.device import SwitchCost
from libra.lengths import LengthTracker
from libra.plan.allocation import Allocation
from libra.plan.model.solve import STEP_TOLERANCE
from libra.plan.options.price import infeasibility, price
from libra.plan.planner import Planner, recipe_tracker
from libra.plan.price_bias import FRESH
from libra.plan.replanner import Replanner
from libra.trajectory import Trajectory, Turn

RECIPE = SMALL_BATCHES.model_copy(update={"batch": 1024})
PLANNER = Planner(CLUSTER, QWEN_14B, RECIPE)
FREE = SwitchCost(0.0, 0.0, 0.0)
NEVER_WORTH_IT = SwitchCost(1e9, 1e9, 0.0)


def started(switch: SwitchCost, calls: int = 1) -> tuple[Replanner, Allocation]:
    """After a first step on trajectories of about so many calls."""
    replanner = Replanner(PLANNER, switch=switch)
    replanner.step(trajectories(0, calls), [])
    assert replanner.plan is not None
    return replanner, replanner.plan.allocation


def test_the_first_step_starts_a_plan() -> None:
    replanner = Replanner(PLANNER)
    assert replanner.plan is None
    decision = replanner.step(trajectories(0, 2), [])
    assert (decision.taken, decision.current, decision.transition.moves, decision.cost) == (True, None, (), 0.0)
    assert replanner.plan is not None
    assert replanner.plan.placement
    assert sum(group.devices for group in replanner.plan.placement) <= CLUSTER.devices
    assert [look.decision for look in replanner.looks] == [decision]


def test_longer_trajectories_change_the_plan_and_the_change_has_a_way() -> None:
    replanner, before = started(FREE)
    decision = replanner.step(trajectories(1, 20), [])
    assert decision.taken
    assert decision.current is not None
    assert decision.gain_per_step == decision.current.step - decision.proposed.step > 0
    assert decision.transition.moves
    assert replanner.plan is not None
    assert replanner.plan.allocation != before
    assert replanner.plan.layout is not None
    assert replanner.plan.layout.dp == replanner.plan.allocation.replicas


def test_a_change_that_never_pays_is_not_made_though_the_layout_left_the_menu() -> None:
    """What runs keeps its price when other lengths have other fastest layouts, and with it its right to stay."""
    planner = Planner(CLUSTER, QWEN_14B, SMALL_BATCHES)
    replanner = Replanner(planner, switch=NEVER_WORTH_IT)
    replanner.step(trajectories(0, 1), [])
    assert replanner.plan is not None
    before = replanner.plan.allocation
    longer = LengthTracker(1e9)
    for trajectory in trajectories(1, 20):
        longer.observe(trajectory)
    menu = planner.problem(longer)
    assert "no option trains" in (infeasibility(menu, before) or ""), (
        "the case shows nothing: the layout is on both menus"
    )
    for version in range(1, 4):
        decision = replanner.step(trajectories(version, 20), [])
        assert not decision.taken
        assert decision.current is not None
    assert replanner.plan.allocation == before


def test_nothing_changes_where_nothing_has() -> None:
    replanner, before = started(FREE)
    decision = replanner.step([], [])
    assert not decision.taken
    assert replanner.plan is not None
    assert replanner.plan.allocation == before


def test_what_still_runs_counts() -> None:
    """Unfinished trajectories that are long already say as much as finished ones."""
    short_only, with_long = (
        Replanner(PLANNER, tracker=None).step(trajectories(0, 2), running)
        for running in ([], trajectories(0, 20, finished=False))
    )
    assert with_long.proposed.step > 2 * short_only.proposed.step


def test_unrecorded_tool_seconds_take_what_the_recipe_says() -> None:
    slow = Planner(CLUSTER, QWEN_14B, RECIPE.model_copy(update={"tool_seconds_if_unknown": 500.0}))
    unknown = [
        Trajectory("t", "t", "made", 200, (Turn(100, "tool", "ok", 100), Turn(100, None, None, 0)), None, 0, True)
    ] * 50
    assert Replanner(slow).step(unknown, []).proposed.latency > 250
    assert Replanner(PLANNER).step(unknown, []).proposed.latency < 50


def test_what_was_measured_is_kept_beside_the_decision() -> None:
    replanner, _ = started(FREE)
    replanner.realised(9.0)
    decision = replanner.step(trajectories(1, 20), [])
    assert [look.realised for look in replanner.looks] == [9.0, None]
    replanner.realised(7.0)
    assert [look.realised for look in replanner.looks] == [9.0, 7.0]
    assert replanner.looks[1].decision == decision


def test_prices_learn_from_settled_steps_alone() -> None:
    """Steps that take twice as long as priced double what is expected; those in which the plan changed say nothing."""
    replanner, _ = started(FREE)
    replanner.realised(1e6)  # the plan began in them
    first = replanner.step([], [])
    assert replanner.bias == FRESH
    assert first.current is not None and not first.taken
    replanner.realised(2 * first.current.step)
    second = replanner.step([], [])
    bottleneck = first.current.bottleneck
    assert 1.3 < replanner.bias.factor(bottleneck) < 2.3
    assert second.current is not None
    assert second.current.step == pytest.approx(first.current.step * replanner.bias.factor(bottleneck))


def test_a_run_goes_on_from_its_plan_and_tracker() -> None:
    replanner, before = started(NEVER_WORTH_IT)
    tracker = LengthTracker(128.0)
    tracker.observe_running(())
    resumed = Replanner(PLANNER, replanner.plan, tracker=tracker, switch=NEVER_WORTH_IT)
    decision = resumed.step(trajectories(0, 1), [])
    assert decision.current is not None
    assert not decision.taken
    assert resumed.plan is not None
    assert resumed.plan.allocation == before


def test_other_ranges_of_the_same_engines_cost_nothing_where_no_start_is_ever_worth_it() -> None:
    log = [*trajectories(0, 2, 480), *(replace(it, policy_version=0) for it in trajectories(1, 20, 160))]
    replanner = Replanner(PLANNER, switch=NEVER_WORTH_IT)
    replanner.step(log, [])
    assert replanner.plan is not None
    best = replanner.plan.allocation
    first, last = best.buckets
    uneven = replace(best, buckets=(replace(first, up_to=6000), replace(last, above=6000)))
    resumed = Replanner(PLANNER, replace(replanner.plan, allocation=uneven), switch=NEVER_WORTH_IT)
    decision = resumed.step(log, [])
    assert (decision.taken, decision.cost) == (True, 0.0)
    assert (decision.transition.moves, decision.transition.rebuckets) == ((), True)
    assert resumed.plan is not None
    assert resumed.plan.allocation == best


def test_the_proposal_is_as_good_as_the_planner_s_for_what_is_forecast() -> None:
    tracker = LengthTracker(1e9)
    for trajectory in trajectories(0, 2, 2000):
        tracker.observe(trajectory)
    decision = Replanner(PLANNER, tracker=tracker).step([], [])
    planned = PLANNER.plan(tracker)
    # Robustness to lengths that are off by a tenth costs little, and saves nothing where they are as tracked.
    assert decision.proposed.step >= planned.predicted.step * (1 - 0.25)
    assert decision.proposed.step <= planned.predicted.step * (1 + 0.5 + STEP_TOLERANCE)


def test_a_plan_is_expected_to_hold_as_long_as_plans_have() -> None:
    replanner = Replanner(PLANNER, period=4, switch=FREE)
    horizons = [replanner.step(trajectories(0, 1), []).horizon_steps]
    horizons += [replanner.step([], []).horizon_steps for _ in range(2)]
    changed = replanner.step(trajectories(1, 20), [])
    assert changed.taken
    horizons += [changed.horizon_steps, replanner.step([], []).horizon_steps]
    assert horizons == [4, 4, 8, 12, 8]


def test_a_plan_is_judged_by_lengths_that_are_somewhat_off_as_well() -> None:
    replanner = Replanner(PLANNER)
    decision = replanner.step(trajectories(0, 10), [])
    assert replanner.plan is not None
    assert decision.proposed.training > replanner.plan.predicted.training * 1.001
    assert replanner.plan.predicted == price(replanner.plan.request.menu().problem, replanner.plan.allocation)


def test_where_no_plan_serves_all_lengths_the_likeliest_decide_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.plan.decision.infeasibility", lambda problem, allocation: "too long")
    replanner = Replanner(PLANNER)
    decision = replanner.step(trajectories(0, 10), [])
    assert replanner.plan is not None
    assert decision.proposed == replanner.plan.predicted


def test_results_can_be_pickled_and_are_the_same_every_time() -> None:
    runs = []
    for _ in range(2):
        replanner, _ = started(FREE)
        replanner.step(trajectories(1, 20), trajectories(2, 8, 30, finished=False))
        runs.append(pickle.dumps((replanner.plan, replanner.looks)))
        assert pickle.loads(runs[-1]) == (replanner.plan, replanner.looks)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_measured_seconds_are_positive(value: float) -> None:
    replanner, _ = started(FREE)
    with pytest.raises(ValueError, match="seconds_per_step"):
        replanner.realised(value)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="period is 0"):
        Replanner(PLANNER, period=0)
    with pytest.raises(ValueError, match=r"call step\(\) before realised\(\)"):
        Replanner(PLANNER).realised(1.0)
    with pytest.raises(ValueError, match="observe"):
        Replanner(PLANNER).step([], [])
    with pytest.raises(ValueError, match="planner and tracker are missing"):
        Replanner(None)
    with pytest.raises(ValueError, match="there is no planner; call outlook"):
        Replanner(None, tracker=recipe_tracker(PLANNER.recipe, 4.0)).step(trajectories(1, 1), [])


def test_what_cannot_be_used_is_refused_before_anything_is_observed() -> None:
    replanner, _ = started(FREE)
    (too_long,) = trajectories(1, 38, count=1)
    too_long = replace(too_long, id="huge", prompt_tokens=10**6)
    good = trajectories(1, 1)
    for finished, running, problem in (
        ([*good, too_long], [], "trajectory huge holds .* more than the recipe's max_length"),
        (good, good[:1], "is finished; give it as finished"),
        (trajectories(1, 1, finished=False), [], "is unfinished; give it as running"),
    ):
        with pytest.raises(ValueError, match=problem):
            replanner.step(finished, running)
    untouched, _ = started(FREE)
    assert replanner.step(good, []) == untouched.step(good, [])
