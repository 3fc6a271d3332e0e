"""Periods and decisions as they are written down, run after run of steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from libra.loop.periods import Periods, Stayed
from libra.loop.recorder import Recorder
from libra.plan.price_bias import BOTTLENECKS, FRESH, PeriodSeconds, PriceBias, measured
from libra.plan.solution import Prediction
from libra.records.schema import DecisionRecord, Learned, PeriodRecord

PRICED = Prediction(step=1.6, rollout=1.6, training=1.0, latency=0.5, bottleneck="rollout")
HINDSIGHT = Prediction(step=1.8, rollout=1.8, training=1.0, latency=0.5, bottleneck="rollout")
PREDICTED = Prediction(step=2.0, rollout=2.0, training=1.0, latency=0.5, bottleneck="rollout")
DECISION = DecisionRecord(
    period=1,
    step=10,
    time=30.0,
    before="train 2 | short 2",
    after="train 1 | short 3",
    before_seconds=3.0,
    after_seconds=2.0,
    gain_per_step=1.0,
    horizon_steps=100,
    cost=5.0,
    uncertainty=0.1,
    taken=True,
    reason="saves 95 s",
    solver_status="optimal",
    solver_gap=0.0,
    solver_seconds=0.2,
    moves=("train -> rollout",),
    measured_before=3.5,
)


class Written:
    """Keeps what a recorder is told."""

    def __init__(self) -> None:
        self.periods: list[PeriodRecord] = []
        self.decisions: list[DecisionRecord] = []
        self.bias = FRESH
        self.learned: list[tuple[Prediction, PeriodSeconds, bool]] = []

    def learn(self, priced: Prediction, found: PeriodSeconds, untried: bool) -> PriceBias:
        self.learned.append((priced, found, untried))
        self.bias = self.bias.learned(priced, found, untried=untried)
        return self.bias

    def period(self, record: PeriodRecord) -> None:
        self.periods.append(record)

    def decision(self, record: DecisionRecord) -> None:
        self.decisions.append(record)


def made(first: int = 0) -> tuple[Periods, Written]:
    written = Written()
    return Periods(cast(Recorder, written), written.learn, first), written


def unasked() -> Stayed | None:
    raise AssertionError("no decision waits: nothing is to be priced")


def run(
    periods: Periods,
    first_step: int,
    *seconds: float,
    switching: bool = False,
    allocation: str = "train 1 | short 1",
    without_change: Callable[[], Stayed | None] = unasked,
) -> None:
    """One whole period."""
    periods.begin(first_step, allocation, PRICED, PREDICTED, switching)
    for step in seconds:
        periods.step(step)
    periods.end(lambda: HINDSIGHT, without_change)


def test_a_period_is_the_mean_of_its_steps() -> None:
    periods, written = made(first=3)
    run(periods, 11, 1.0, 2.0, 6.0)
    record = PeriodRecord(
        period=3,
        first_step=11,
        last_step=13,
        allocation="train 1 | short 1",
        predicted_seconds=2.0,
        measured_seconds=3.0,
        predicted_bottleneck="rollout",
        switching=False,
        priced_seconds=1.6,
        measured_error=measured([1.0, 2.0, 6.0]).error,
        hindsight_seconds=1.8,
        learned={name: Learned(written.bias.factor(name), written.bias.error(name)) for name in BOTTLENECKS},
    )
    assert written.periods == [record]
    assert periods.number == 4


@pytest.mark.parametrize("begun", [False, True])
def test_a_period_without_a_step_is_not_written(begun: bool) -> None:
    periods, written = made()
    if begun:
        periods.begin(1, "train 1", PRICED, PREDICTED, switching=False)
    periods.end(lambda: HINDSIGHT, unasked)
    assert (written.periods, periods.number) == ([], 0)


def test_a_switch_in_the_middle_marks_the_period() -> None:
    periods, written = made()
    periods.mark_switching()  # nothing is open: nothing to mark
    periods.step(1.0)  # likewise
    assert periods.predicted_seconds is None
    periods.begin(1, "train 1", PRICED, PREDICTED, switching=False)
    periods.step(1.0)
    assert periods.predicted_seconds == 2.0
    periods.mark_switching()
    periods.end(lambda: HINDSIGHT, unasked)
    assert [record.switching for record in written.periods] == [True]


def test_only_steady_periods_are_a_measure_of_the_allocation() -> None:
    periods, _ = made()
    assert periods.measured_before is None
    run(periods, 1, 4.0, switching=True)
    assert periods.measured_before is None
    run(periods, 2, 3.0)
    run(periods, 3, 9.0, switching=True)
    assert periods.measured_before == 3.0


@pytest.mark.parametrize(("stayed", "gain"), [(3.25, 0.75), (2.0, -0.5), (None, None)])
def test_a_taken_decision_learns_its_cost_and_then_its_gain(stayed: float | None, gain: float | None) -> None:
    """The gain is held against what the old allocation would cost now, not against what it cost before. Both sides'
    errors are in its own."""
    periods, written = made()
    periods.decided(DECISION)
    run(periods, 11, 9.0, switching=True)
    periods.carried_out(6.5)
    run(periods, 12, 9.0, switching=True)  # still the switch: says nothing of the new allocation
    run(periods, 13, 2.0, 3.0, without_change=lambda: None if stayed is None else Stayed(stayed, 0.5))
    run(periods, 15, 1.0)  # the outcome was told: not told again
    paid = replace(DECISION, measured_cost=6.5)
    error = None if stayed is None else math.hypot(0.5, measured([2.0, 3.0]).error)
    outcome = replace(paid, measured_after=2.5, realised_gain_per_step=gain, realised_error=error)
    assert written.decisions == [DECISION, paid, outcome]


def test_only_settled_periods_teach_prices_and_say_what_they_taught() -> None:
    periods, written = made()
    run(periods, 1, 4.0, 5.0)
    run(periods, 3, 9.0, switching=True)
    run(periods, 4, 3.0, allocation="train 2 | short 1")
    run(periods, 5, 3.0, allocation="train 2 | short 1")
    assert written.learned == [
        (HINDSIGHT, measured([4.0, 5.0]), False),
        (HINDSIGHT, measured([3.0]), True),
        (HINDSIGHT, measured([3.0]), False),
    ]
    assert [bool(period.learned) for period in written.periods] == [True, False, True, True]


def test_the_allocation_that_was_left_is_priced_before_the_new_one_teaches_anything() -> None:
    periods, written = made()
    periods.decided(DECISION)
    periods.carried_out(6.5)
    known: list[int] = []
    run(periods, 11, 2.0, without_change=lambda: known.append(len(written.learned)))
    assert (known, len(written.learned)) == ([0], 1)


def test_a_decision_that_is_not_carried_out_yet_waits() -> None:
    periods, written = made()
    periods.decided(DECISION)
    run(periods, 11, 2.0)
    assert written.decisions == [DECISION]
    periods.carried_out(6.5)
    run(periods, 12, 2.25, without_change=lambda: Stayed(3.0, 0.1))
    assert written.decisions[-1].measured_after == 2.25


def test_a_dropped_decision_has_no_outcome() -> None:
    periods, written = made()
    periods.decided(DECISION)
    periods.dropped()
    periods.carried_out(6.5)  # by something else
    run(periods, 11, 2.0)
    assert written.decisions == [DECISION]


def test_a_decision_that_was_not_taken_waits_for_nothing() -> None:
    periods, written = made()
    kept = replace(DECISION, taken=False)
    periods.decided(kept)
    periods.carried_out(6.5)
    run(periods, 11, 2.0)
    assert written.decisions == [kept]
