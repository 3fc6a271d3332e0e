"""What a change costs, when it is taken, and what the decision says about it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_14B, RECIPE
from oracles.small_problem import problem_of
from tables import by_name

from libra.cost.device import SwitchCost
from libra.plan.allocation import ONE_DEVICE, Allocation, Bucket
from libra.plan.decision import (
    ENGINE_START,
    TRAINER_START,
    Case,
    cluster_seconds,
    decide,
    expected,
    live_refill,
    machine_seconds,
    switch_cost,
)
from libra.plan.options.price import price
from libra.plan.planner import Planner
from libra.plan.price_bias import EXACT, PriceBias
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption
from libra.plan.solution import Prediction
from libra.plan.transition import IDLE, TRAIN, Duty, Move, Role, Transition, group_transition


def make_problem(work: float = 8.0, layout: str = ONE_DEVICE) -> Problem:
    """Two classes on four devices; with one class a bucket, a step takes `work / engines`, at least 1 s."""
    engines = tuple(
        EngineOption(shape, "pool", 1, 4, holds, 0.0, ((work / 2, work / 2),), (0.0, 0.0), (0.5, 0.5))
        for shape, holds in (("short", 2000), ("long", 5000))
    )
    training = tuple(TrainingOption(layout, "pool", count, count, 1.0, 0.0) for count in (1, 2))
    return problem_of(
        pools=(Pool("pool", 1, 4),),
        engines=engines,
        training=training,
        peaks=(1000, 4000),
        longest_context=5000,
        staleness=3,
    )


def one_bucket(replicas: int, engines: int, end: int = 5000) -> Allocation:
    return Allocation(replicas, (Bucket("long", engines, 0, end),))


PROBLEM = make_problem()
ALWAYS = (Case(PROBLEM, 1.0),)
SLOW, FAST = one_bucket(2, 2), one_bucket(1, 3)  # 4 s and 8/3 s a step


TABLE = [
    ("pays", SLOW, FAST, 6.0, 0.1, 7.9, True, "saves 1.333 s of 4 s a step, 8 s over 6 steps, more than the 7.9 s"),
    ("exactly pays back: no", SLOW, FAST, 6.0, 0.1, 8.0 + 1e-9, False, "8 s over 6 steps, not more than the 8 s"),
    ("too short a horizon", SLOW, FAST, 5.0, 0.1, 7.9, False, "6.667 s over 5 steps, not more than the 7.9 s it costs"),
    (
        "within uncertainty",
        SLOW,
        FAST,
        100.0,
        0.34,
        0.0,
        False,
        "not more than the 1.36 s of uncertainty in the tracked work",
    ),
    ("free but slower", FAST, SLOW, 100.0, 0.0, 0.0, False, "takes 1.333 s longer than 2.667 s"),
    ("the same", FAST, FAST, 100.0, 0.0, 0.0, False, "the current allocation is optimal"),
]


@by_name("current, proposed, horizon, uncertainty, cost, taken, reason", TABLE)
def test_decide(
    current: Allocation,
    proposed: Allocation,
    horizon: float,
    uncertainty: float,
    cost: float,
    taken: bool,
    reason: str,
) -> None:
    transition = group_transition(current, proposed)
    found = decide(ALWAYS, transition, horizon_steps=horizon, uncertainty=uncertainty, cost=cost, bias=EXACT)
    assert found.taken is taken
    assert reason in found.reason
    assert found.current == price(PROBLEM, current)
    assert found.proposed == price(PROBLEM, proposed)
    assert found.gain_per_step == found.current.step - found.proposed.step
    assert found.transition == transition
    assert (found.horizon_steps, found.uncertainty, found.cost) == (horizon, uncertainty, cost)


@pytest.mark.parametrize(
    ("current", "reason"),
    [
        (one_bucket(1, 3, end=4000), "ends at 4000 tokens; the longest context is 5000"),
        (one_bucket(2, 3), "uses 5 devices"),
        (one_bucket(3, 1), "no option trains 3 replicas"),
    ],
)
def test_an_allocation_that_no_longer_fits_is_left_at_any_cost(current: Allocation, reason: str) -> None:
    found = decide(ALWAYS, group_transition(current, FAST), horizon_steps=1.0, uncertainty=1.0, cost=1e9, bias=EXACT)
    assert found.taken
    assert found.reason.startswith("the current allocation no longer fits: ")
    assert reason in found.reason
    assert (found.current, found.gain_per_step) == (None, None)


def test_where_nothing_runs_the_proposal_is_taken() -> None:
    found = decide(ALWAYS, Transition(None, FAST, ()), horizon_steps=0.0, uncertainty=1.0, cost=1e9, bias=EXACT)
    assert (found.taken, found.current, found.proposed) == (True, None, price(PROBLEM, FAST))


def test_cases_are_weighed() -> None:
    """Half of the time there is thrice the work: the step is the mean, the bottleneck that of the first likeliest."""
    cases = (Case(PROBLEM, 0.5), Case(make_problem(work=24.0), 0.5))
    assert expected(cases, SLOW) == Prediction(8.0, 8.0, 1.0, 0.375, "rollout")
    found = decide(cases, group_transition(SLOW, FAST), horizon_steps=1.0, uncertainty=0.0, cost=2.6, bias=EXACT)
    assert found.gain_per_step == pytest.approx(8 - 16 / 3)
    assert found.taken
    assert not decide(
        cases, group_transition(SLOW, FAST), horizon_steps=1.0, uncertainty=0.0, cost=2.7, bias=EXACT
    ).taken
    assert not decide(
        cases[:1], group_transition(SLOW, FAST), horizon_steps=1.0, uncertainty=0.0, cost=2.6, bias=EXACT
    ).taken


def test_what_fits_only_some_cases_is_left() -> None:
    smaller = replace(PROBLEM, pools=(Pool("pool", 1, 3),))
    cases = (Case(PROBLEM, 0.9), Case(smaller, 0.1))
    found = decide(
        cases, group_transition(SLOW, one_bucket(1, 2)), horizon_steps=1.0, uncertainty=0.0, cost=1e9, bias=EXACT
    )
    assert found.taken
    assert "uses 4 devices" in found.reason


@pytest.mark.parametrize("argument", ["horizon_steps", "uncertainty", "cost"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_arguments_are_not_negative(argument: str, value: float) -> None:
    arguments = {"horizon_steps": 1.0, "uncertainty": 0.0, "cost": 0.0, argument: value}
    with pytest.raises(ValueError, match=argument):
        decide(ALWAYS, group_transition(SLOW, FAST), bias=EXACT, **arguments)


def test_a_proposal_that_does_not_fit_is_an_error() -> None:
    smaller = replace(PROBLEM, pools=(Pool("pool", 1, 3),))
    transition = group_transition(one_bucket(1, 2), FAST)
    with pytest.raises(ValueError, match="uses 4 devices of pool pool; it has 3"):
        decide([Case(smaller, 1.0)], transition, horizon_steps=1.0, uncertainty=0.0, cost=0.0, bias=EXACT)


LEARNED = PriceBias(
    (math.log(1.5), 0.0, 0.0), ((0.0025, 0.0, 0.0), (0.0, 0.0025, 0.0), (0.0, 0.0, 0.0025)), 0.0, EXACT.prior
)
ONE_TRAINS_5 = replace(PROBLEM, training=(replace(PROBLEM.training[0], seconds=5.0), PROBLEM.training[1]))
# Rollout takes half as long again: SLOW 6 s and FAST 4 s, unless one replica trains for 5 s. Errors are 5 %.
BIASED = [
    ("a gain above the error of prices", PROBLEM, LEARNED, True, 2.0, 0.05 * 2.0),
    ("an allocation that did not run may be wrong by more", PROBLEM, replace(LEARNED, untried=0.3), True, 2.0,
     math.hypot(0.05 * 2.0, 0.3 * 4.0)),
    ("a gain below it", PROBLEM, replace(LEARNED, untried=0.6), False, 2.0, math.hypot(0.05 * 2.0, 0.6 * 4.0)),
    ("two bottlenecks: their errors do not cancel", ONE_TRAINS_5, LEARNED, True, 1.0,
     math.hypot(0.05 * 6.0, 0.05 * 5.0)),
    ("a bottleneck that nothing is known of", ONE_TRAINS_5,
     replace(LEARNED, covariance=((0.0025, 0.0, 0.0), (0.0, 0.09, 0.0), (0.0, 0.0, 0.09))), False, 1.0,
     math.hypot(0.05 * 6.0, 0.3 * 5.0)),
]  # fmt: skip


@by_name("problem, bias, taken, gain, error", BIASED)
def test_a_gain_has_to_exceed_what_corrected_prices_may_be_wrong_by(
    problem: Problem, bias: PriceBias, taken: bool, gain: float, error: float
) -> None:
    cases, change = (Case(problem, 1.0),), group_transition(SLOW, FAST)
    found = decide(cases, change, horizon_steps=1e9, uncertainty=0.0, cost=0.0, bias=bias)
    assert (found.taken, found.gain_per_step, found.price_error) == (taken, pytest.approx(gain), pytest.approx(error))
    assert found.doubt == found.price_error
    assert found.current == bias.corrected(price(problem, SLOW))
    assert found.proposed == bias.corrected(price(problem, FAST))
    assert taken or "s of uncertainty in prices" in found.reason


def test_the_errors_of_work_and_of_prices_add_up_as_independent_ones() -> None:
    bias = replace(LEARNED, untried=0.25)
    found = decide(ALWAYS, group_transition(SLOW, FAST), horizon_steps=1e9, uncertainty=0.3, cost=0.0, bias=bias)
    assert found.doubt == pytest.approx(math.hypot(0.3 * 6.0, found.price_error))
    assert 0.3 * 6.0 < 2.0 and found.price_error < 2.0 < found.doubt
    assert not found.taken
    assert f"{found.doubt:.4g} s together" in found.reason


# What a change costs.

REQUEST = Planner(CLUSTER, QWEN_14B, RECIPE).request(CLASSES)
SWITCH = SwitchCost(engine_start=50.0, trainer_join=30.0, weight_load=2.0)


def engine(shape: str, devices: int) -> EngineOption:
    return EngineOption(shape, "pool", devices, 4, 5000, 0.0, ((1.0, 1.0),), (0.0, 0.0), (0.0, 0.0))


CLUSTERED = problem_of(
    pools=(Pool("pool", 2, 8),),
    engines=(engine("tp1", 1), engine("tp4", 4)),
    training=(TrainingOption("a", "pool", 4, 2, 1.0, 0.0), TrainingOption("b", "pool", 8, 2, 1.0, 0.0)),
    peaks=(1000, 5000),
)


def allocation(replicas: int, small: int, large: int, layout: str = "a", cut: int = 1000) -> Allocation:
    return Allocation(replicas, (Bucket("tp1", small, 0, cut), Bucket("tp4", large, cut, 5000)), layout)


CHANGES = [
    ("nothing", allocation(2, 4, 2), (), 0.0),
    ("ranges only", allocation(2, 4, 2, cut=2000), (), 0.0),
    ("engines start side by side", allocation(2, 6, 3), ("idle -> rollout:tp4", "2 x idle -> rollout:tp1"), 50.0),
    ("a replica joins", allocation(3, 4, 2), ("idle -> train:a",), 30.0),
    ("a replica leaves", allocation(1, 4, 2), ("train:a -> idle",), 0.0),
    # Another layout starts all replicas anew.
    ("another layout", allocation(2, 4, 2, "b"), ("2 x train:a -> idle", "2 x idle -> train:b"), 30.0),
    # 4 of 12 generating devices lose their contexts; 60 device seconds a third of which are made up for on 12 devices.
    ("one shape for another", allocation(2, 8, 1), ("rollout:tp4 -> idle", "4 x idle -> rollout:tp1"),
     50.0 + 60 / 3 / 12),
    # 2 of 12 stop, 10 remain; a replica starts meanwhile.
    ("from engines to a replica", allocation(3, 2, 2), ("2 x rollout:tp1 -> idle", "idle -> train:a"),
     30.0 + 60 / 6 / 10),
]  # fmt: skip


@by_name("wanted, way, cost", CHANGES)
def test_changes_and_their_seconds(wanted: Allocation, way: tuple[str, ...], cost: float) -> None:
    current = allocation(2, 4, 2)
    transition = group_transition(current, wanted)
    ranges = ("new bucket ranges",) if transition.rebuckets else ()
    assert transition.words() == (*way, *ranges)
    assert cluster_seconds(CLUSTERED, transition, SWITCH, refill=60.0) == pytest.approx(cost)


def test_a_shape_that_is_no_longer_there_loses_nothing_more() -> None:
    gone = Allocation(2, (Bucket("tp2", 4, 0, 1000), Bucket("tp4", 2, 1000, 5000)), "a")
    transition = group_transition(gone, allocation(2, 4, 2))
    assert cluster_seconds(CLUSTERED, transition, SWITCH, refill=60.0) == 50.0


def test_stated_costs_of_a_cluster() -> None:
    """Qwen3-14B: 14.77e9 parameters; 16 bytes each cross 200 Gb/s, 90 % of it achieved; 2 bytes load at 68 GB/s."""
    cost = switch_cost(REQUEST)
    assert cost.weight_load == pytest.approx(1.2 + 14.77e9 * 2 / 68e9, rel=1e-3)
    assert cost.engine_start == ENGINE_START + cost.weight_load
    assert cost.trainer_join == pytest.approx(TRAINER_START + 14.77e9 * 16 / 22.5e9, rel=1e-3)


def test_where_nothing_ran_nothing_is_lost() -> None:
    assert cluster_seconds(PROBLEM, Transition(None, allocation(1, 1, 1), ()), switch_cost(REQUEST)) == 0.0


def test_refill_grows_with_what_is_alive() -> None:
    """At 312 TFLOP/s two FLOPs for each of 14.77e9 parameters and each live token are the least that prefill takes."""
    seconds = live_refill(REQUEST)
    tokens = 2 * RECIPE.batch * sum(cls.share * cls.context_sum / cls.generated for cls in CLASSES)
    assert 1.0 < seconds / (tokens * 2 * 14.77e9 / 312e12) < 4.0
    assert live_refill(replace(REQUEST, recipe=RECIPE.model_copy(update={"staleness": 3}))) == 2 * seconds


def test_moves_of_a_machine_are_paid_one_after_the_other() -> None:
    short, long = Duty(Role.ROLLOUT, "short"), Duty(Role.ROLLOUT, "long")
    switch = SwitchCost(engine_start=8.0, trainer_join=3.0, weight_load=0.5)
    for moves, cost in (
        ([], 0.0),
        ([Move("a", TRAIN, long), Move("b", short, long)], 16.0),
        ([Move("a", IDLE, TRAIN), Move("b", short, TRAIN), Move("c", IDLE, short)], 14.0),
    ):
        assert machine_seconds(Transition(None, SLOW, tuple(moves)), switch) == cost
