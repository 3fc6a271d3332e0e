"""Predictions held against what happened: periods of equal allocation, and the decisions between them.

Invariant: a prediction is made before the steps that it speaks of; a period in which a worker changed role says so and
ends with the change, so that every other period measures one allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from libra.loop.recorder import Recorder
from libra.plan.problem import Prediction
from libra.records.schema import DecisionRecord, PeriodRecord


@dataclass(slots=True)
class _Open:
    first_step: int
    allocation: str
    predicted: Prediction
    switching: bool
    seconds: list[float]


class Periods:
    """The open period, and the decisions whose outcome is not known yet."""

    def __init__(self, recorder: Recorder, first: int = 0) -> None:
        self._recorder = recorder
        self._number = first
        self._open: _Open | None = None
        self._last_steady: float | None = None  # measured step seconds of the last period without a switch
        self._waiting: DecisionRecord | None = None

    @property
    def number(self) -> int:
        return self._number

    @property
    def predicted_seconds(self) -> float | None:
        return self._open.predicted.step if self._open is not None else None

    @property
    def measured_before(self) -> float | None:
        """Measured step seconds of the latest period without a switch."""
        return self._last_steady

    def begin(self, step: int, allocation: str, predicted: Prediction, switching: bool) -> None:
        """A period starts with `step`."""
        self._open = _Open(step, allocation, predicted, switching, [])

    def step(self, seconds: float) -> None:
        """One step was made. Outside a period (nothing could be predicted) it counts for none."""
        if self._open is not None:
            self._open.seconds.append(seconds)

    def mark_switching(self) -> None:
        """A worker changes role in the open period."""
        if self._open is not None:
            self._open.switching = True

    def end(self, without_change: Callable[[], float | None]) -> None:
        """Close the open period and tell a waiting decision what came of it. `without_change` prices the allocation
        that the decision left, for the work as it is now."""
        if self._open is None or not self._open.seconds:
            return
        period = self._open
        record = PeriodRecord(
            period=self._number,
            first_step=period.first_step,
            last_step=period.first_step + len(period.seconds) - 1,
            allocation=period.allocation,
            predicted_seconds=period.predicted.step,
            measured_seconds=fmean(period.seconds),
            predicted_bottleneck=period.predicted.bottleneck,
            switching=period.switching,
        )
        self._recorder.period(record)
        self._number += 1
        self._open = None
        if not record.switching:
            self._last_steady = record.measured_seconds
            self._settle(record.measured_seconds, without_change)

    def decided(self, record: DecisionRecord) -> None:
        """A decision was made; a taken one waits for the first steady period after it."""
        self._recorder.decision(record)
        if record.taken:
            self._waiting = record

    def carried_out(self, seconds: float) -> None:
        """The taken decision's moves are done."""
        if self._waiting is not None:
            self._waiting = replace(self._waiting, measured_cost=seconds)
            self._recorder.decision(self._waiting)

    def dropped(self) -> None:
        """The taken decision is not what the workers do: nothing that is measured is its outcome."""
        self._waiting = None

    def _settle(self, measured: float, without_change: Callable[[], float | None]) -> None:
        waiting = self._waiting
        if waiting is None or waiting.measured_cost is None:
            return
        # The work drifts, so the step time before the change is no measure of what staying would have cost.
        stayed = without_change()
        gain = stayed - measured if stayed is not None else None
        self._recorder.decision(replace(waiting, measured_after=measured, realised_gain_per_step=gain))
        self._waiting = None
