"""When a proposed plan is taken, and what the decision says about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_request import PROFILE, REQUEST, WORKLOAD, one_bucket, two_buckets

from libra.plan.moves import diff
from libra.plan.price import price
from libra.plan.problem import Allocation, Plan, PlanRequest, Proof
from libra.plan.replan import decide

# With much staleness the step is what the busiest bucket takes: 8.7 s with one short engine, 4.5 s with two.
PATIENT = replace(REQUEST, workload=replace(WORKLOAD, max_staleness=15))
SLOW, FAST = two_buckets(1, 1, 2), two_buckets(1, 2, 1)


def proposal(request: PlanRequest, allocation: Allocation) -> Plan:
    predicted = price(request, allocation)
    return Plan(request, allocation, predicted, Proof("optimal", predicted.step, 0.0))


TABLE = [
    ("pays", SLOW, FAST, 2.0, 0.1, 8.0, True, "saves 4.2 s of 8.7 s a step, 8.4 s over 2 steps, more than the 8 s"),
    ("exactly pays back: no", SLOW, FAST, 2.0, 0.1, 8.4 + 1e-9, False, "8.4 s over 2 steps, not more than the 8.4 s"),
    ("too short a horizon", SLOW, FAST, 1.0, 0.1, 8.0, False, "4.2 s over 1 steps, not more than the 8 s it costs"),
    ("within uncertainty", SLOW, FAST, 100.0, 0.5, 0.0, False, "not more than the 4.35 s by which the tracked work"),
    ("free but slower", FAST, SLOW, 100.0, 0.0, 0.0, False, "takes 4.2 s longer than 4.5 s"),
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
    request = replace(PATIENT, current=current)
    decision = decide(request, proposal(request, proposed), horizon_steps=horizon, uncertainty=uncertainty, cost=cost)
    assert decision.taken is taken
    assert reason in decision.reason
    assert decision.current == price(request, current)
    assert decision.proposed == price(request, proposed)
    assert decision.gain_per_step == decision.current.step - decision.proposed.step
    assert decision.moves == diff(current, proposed)
    assert (decision.horizon_steps, decision.uncertainty, decision.cost) == (horizon, uncertainty, cost)


@pytest.mark.parametrize(
    ("current", "reason"),
    [
        (two_buckets(1, 1, 2, end=4000), "ends at 4000 tokens; the longest context is 5000"),
        (two_buckets(1, 2, 2), "uses 5 devices; the fleet has 4"),
        (two_buckets(1, 1, 1), "uses 3 devices; the fleet has 4"),
    ],
)
def test_an_allocation_that_no_longer_fits_is_left_at_any_cost(current: Allocation, reason: str) -> None:
    request = replace(PATIENT, current=current)
    decision = decide(request, proposal(request, FAST), horizon_steps=1.0, uncertainty=1.0, cost=1e9)
    assert decision.taken
    assert decision.reason.startswith("the current allocation no longer fits: ")
    assert reason in decision.reason
    assert (decision.current, decision.gain_per_step) == (None, None)


def test_both_sides_are_priced_for_the_work_of_the_request() -> None:
    """A proposal computed under yesterday's workload is judged under today's."""
    request = replace(PATIENT, current=SLOW)
    yesterday = replace(request, workload=replace(request.workload, trajectories=64))
    stale = proposal(yesterday, FAST)
    decision = decide(request, stale, horizon_steps=2.0, uncertainty=0.1, cost=8.0)
    assert decision.proposed == price(request, FAST) != stale.predicted


@pytest.mark.parametrize("argument", ["horizon_steps", "uncertainty", "cost"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_arguments_are_not_negative(argument: str, value: float) -> None:
    request = replace(PATIENT, current=SLOW)
    arguments = {"horizon_steps": 1.0, "uncertainty": 0.0, "cost": 0.0, argument: value}
    with pytest.raises(ValueError, match=argument):
        decide(request, proposal(request, FAST), **arguments)


def test_there_must_be_an_allocation_to_leave() -> None:
    with pytest.raises(ValueError, match="put the running allocation there"):
        decide(PATIENT, proposal(PATIENT, FAST), horizon_steps=1.0, uncertainty=0.0, cost=0.0)


def test_a_proposal_that_does_not_fit_is_an_error() -> None:
    slow_training = replace(PATIENT, profile=replace(PROFILE, train=replace(PROFILE.train, per_token=1.0)))
    plan = proposal(slow_training, one_bucket(2, 2))
    smaller = replace(slow_training, fleet=replace(slow_training.fleet, hybrid=0), current=one_bucket(1, 2))
    with pytest.raises(ValueError, match="2 devices train; the fleet allows 1"):
        decide(smaller, plan, horizon_steps=1.0, uncertainty=0.0, cost=0.0)
