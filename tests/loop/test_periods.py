"""Periods and decisions as they are written down, run after run of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from libra.loop.periods import Periods
from libra.loop.recorder import Recorder
from libra.plan.problem import Prediction
from libra.records.schema import DecisionRecord, PeriodRecord

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

    def period(self, record: PeriodRecord) -> None:
        self.periods.append(record)

    def decision(self, record: DecisionRecord) -> None:
        self.decisions.append(record)


def made(first: int = 0) -> tuple[Periods, Written]:
    written = Written()
    return Periods(cast(Recorder, written), first), written


def unasked() -> float | None:
    raise AssertionError("no decision waits: nothing is to be priced")


def run(
    periods: Periods,
    first_step: int,
    *seconds: float,
    switching: bool = False,
    without_change: Callable[[], float | None] = unasked,
) -> None:
    """One whole period."""
    periods.begin(first_step, "train 1 | short 1", PREDICTED, switching)
    for step in seconds:
        periods.step(step)
    periods.end(without_change)


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
    )
    assert written.periods == [record]
    assert periods.number == 4


@pytest.mark.parametrize("begun", [False, True])
def test_a_period_without_a_step_is_not_written(begun: bool) -> None:
    periods, written = made()
    if begun:
        periods.begin(1, "train 1", PREDICTED, switching=False)
    periods.end(unasked)
    assert (written.periods, periods.number) == ([], 0)


def test_a_switch_in_the_middle_marks_the_period() -> None:
    periods, written = made()
    periods.mark_switching()  # nothing is open: nothing to mark
    periods.step(1.0)  # likewise
    assert periods.predicted_seconds is None
    periods.begin(1, "train 1", PREDICTED, switching=False)
    periods.step(1.0)
    assert periods.predicted_seconds == 2.0
    periods.mark_switching()
    periods.end(unasked)
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
    """The gain is held against what the old allocation would cost now, not against what it cost before."""
    periods, written = made()
    periods.decided(DECISION)
    run(periods, 11, 9.0, switching=True)
    periods.carried_out(6.5)
    run(periods, 12, 9.0, switching=True)  # still the switch: says nothing of the new allocation
    run(periods, 13, 2.0, 3.0, without_change=lambda: stayed)
    run(periods, 15, 1.0)  # the outcome was told: not told again
    paid = replace(DECISION, measured_cost=6.5)
    assert written.decisions == [DECISION, paid, replace(paid, measured_after=2.5, realised_gain_per_step=gain)]


def test_a_decision_that_is_not_carried_out_yet_waits() -> None:
    periods, written = made()
    periods.decided(DECISION)
    run(periods, 11, 2.0)
    assert written.decisions == [DECISION]
    periods.carried_out(6.5)
    run(periods, 12, 2.25, without_change=lambda: 3.0)
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
