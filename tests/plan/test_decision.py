"""When a proposed plan is taken, and what the decision says about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra.plan.allocation import ONE_DEVICE, Allocation, Bucket
from libra.plan.decision import Case, decide, expected
from libra.plan.options.price import price
from libra.plan.problem import EngineOption, Pool, Prediction, Problem, TrainingOption
from libra.plan.transition import Transition, group_transition


def make_problem(work: float = 8.0, layout: str = ONE_DEVICE) -> Problem:
    """Two classes on four devices; with one class a bucket, a step takes `work / engines`, at least 1 s."""
    engines = tuple(
        EngineOption(shape, "pool", 1, 4, holds, 0.0, ((work / 2, work / 2),), (0.0, 0.0), (0.5, 0.5))
        for shape, holds in (("short", 2000), ("long", 5000))
    )
    training = tuple(TrainingOption(layout, "pool", count, count, 1.0, 0.0) for count in (1, 2))
    return Problem(
        pools=(Pool("pool", 1, 4),),
        engines=engines,
        training=training,
        peaks=(1000, 4000),
        expected=(True, True),
        longest_context=5000,
        recall_known=((1.0, 1.0),),
        recall_possible=((1.0, 1.0),),
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
    ("within uncertainty", SLOW, FAST, 100.0, 0.34, 0.0, False, "not more than the 1.36 s by which the tracked work"),
    ("free but slower", FAST, SLOW, 100.0, 0.0, 0.0, False, "takes 1.333 s longer than 2.667 s"),
    ("the same", FAST, FAST, 100.0, 0.0, 0.0, False, "the current allocation is optimal"),
]


@pytest.mark.parametrize(
    ("current", "proposed", "horizon", "uncertainty", "cost", "taken", "reason"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
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
    found = decide(ALWAYS, transition, horizon_steps=horizon, uncertainty=uncertainty, cost=cost)
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
    found = decide(ALWAYS, group_transition(current, FAST), horizon_steps=1.0, uncertainty=1.0, cost=1e9)
    assert found.taken
    assert found.reason.startswith("the current allocation no longer fits: ")
    assert reason in found.reason
    assert (found.current, found.gain_per_step) == (None, None)


def test_where_nothing_runs_the_proposal_is_taken() -> None:
    found = decide(ALWAYS, Transition(None, FAST, ()), horizon_steps=0.0, uncertainty=1.0, cost=1e9)
    assert (found.taken, found.current, found.proposed) == (True, None, price(PROBLEM, FAST))


def test_cases_are_weighed() -> None:
    """Half of the time there is thrice the work: the step is the mean, the bottleneck that of the first likeliest."""
    cases = (Case(PROBLEM, 0.5), Case(make_problem(work=24.0), 0.5))
    assert expected(cases, SLOW) == Prediction(8.0, 8.0, 1.0, 0.375, "rollout")
    found = decide(cases, group_transition(SLOW, FAST), horizon_steps=1.0, uncertainty=0.0, cost=2.6)
    assert found.gain_per_step == pytest.approx(8 - 16 / 3)
    assert found.taken
    assert not decide(cases, group_transition(SLOW, FAST), horizon_steps=1.0, uncertainty=0.0, cost=2.7).taken
    assert not decide(cases[:1], group_transition(SLOW, FAST), horizon_steps=1.0, uncertainty=0.0, cost=2.6).taken


def test_what_fits_only_some_cases_is_left() -> None:
    smaller = replace(PROBLEM, pools=(Pool("pool", 1, 3),))
    cases = (Case(PROBLEM, 0.9), Case(smaller, 0.1))
    found = decide(cases, group_transition(SLOW, one_bucket(1, 2)), horizon_steps=1.0, uncertainty=0.0, cost=1e9)
    assert found.taken
    assert "uses 4 devices" in found.reason


@pytest.mark.parametrize("argument", ["horizon_steps", "uncertainty", "cost"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_arguments_are_not_negative(argument: str, value: float) -> None:
    arguments = {"horizon_steps": 1.0, "uncertainty": 0.0, "cost": 0.0, argument: value}
    with pytest.raises(ValueError, match=argument):
        decide(ALWAYS, group_transition(SLOW, FAST), **arguments)


def test_a_proposal_that_does_not_fit_is_an_error() -> None:
    smaller = replace(PROBLEM, pools=(Pool("pool", 1, 3),))
    transition = group_transition(one_bucket(1, 2), FAST)
    with pytest.raises(ValueError, match="uses 4 devices of pool pool; it has 3"):
        decide([Case(smaller, 1.0)], transition, horizon_steps=1.0, uncertainty=0.0, cost=0.0)
