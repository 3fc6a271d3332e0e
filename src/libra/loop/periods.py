"""Compares predicted with measured step times, over periods of equal allocation, and judges decisions between them.

Invariant: a prediction is made before its steps. A period in which a worker changed role is marked, and ends with the
change. Every other period is settled: it measures one allocation. Prices learn only from settled periods.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from libra.loop.recorder import Recorder
from libra.plan.price_bias import BOTTLENECKS, PeriodSeconds, PriceBias, measured
from libra.plan.solution import Prediction
from libra.records.schema import DecisionRecord, Learned, PeriodRecord


class Stayed(NamedTuple):
    """Seconds that a step would take now in the allocation before the decision, and their standard error."""

    seconds: float
    error: float


@dataclass(slots=True)
class _Open:
    first_step: int
    allocation: str
    priced: Prediction
    predicted: Prediction  # `priced`, corrected by the bias known at the start of the period
    switching: bool
    seconds: list[float]


class Periods:
    """The open period, and the decision whose outcome is not measured yet."""

    def __init__(
        self, recorder: Recorder, learn: Callable[[Prediction, PeriodSeconds, bool], PriceBias], first: int = 0
    ) -> None:
        """`learn` is called with a settled period's price in hindsight, its measurement, and whether its allocation
        differs from that of the previous settled period. It returns the new bias of prices."""
        self._recorder, self._learn = recorder, learn
        self._number = first
        self._open: _Open | None = None
        self._last_steady: PeriodRecord | None = None  # the last settled period
        self._waiting: DecisionRecord | None = None

    @property
    def number(self) -> int:
        return self._number

    @property
    def predicted_seconds(self) -> float | None:
        return self._open.predicted.step if self._open is not None else None

    @property
    def measured_before(self) -> float | None:
        """Measured step seconds of the last settled period."""
        return None if self._last_steady is None else self._last_steady.measured_seconds

    def begin(self, step: int, allocation: str, priced: Prediction, predicted: Prediction, switching: bool) -> None:
        """Begin a period with `step`; `predicted` is the corrected price."""
        self._open = _Open(step, allocation, priced, predicted, switching, [])

    def step(self, seconds: float) -> None:
        """Add a step to the open period. Outside a period, which happens if no prediction was possible, ignore it."""
        if self._open is not None:
            self._open.seconds.append(seconds)

    def mark_switching(self) -> None:
        """Mark the open period as one in which a worker changes role."""
        if self._open is not None:
            self._open.switching = True

    def end(self, hindsight: Callable[[], Prediction | None], without_change: Callable[[], Stayed | None]) -> None:
        """Close the open period, record the outcome of a waiting decision, and let prices learn.

        Prices learn from `hindsight`, the price of the period's allocation for the measured lengths and speeds. With
        the price from before the period, changes of lengths and speeds would be corrected twice. `without_change`
        prices the allocation before the decision for the current work. It is called before prices learn, since the time
        in the new allocation is no evidence about the old one.
        """
        if self._open is None or not self._open.seconds:
            return
        period, self._open = self._open, None
        record = PeriodRecord(
            period=self._number,
            first_step=period.first_step,
            last_step=period.first_step + len(period.seconds) - 1,
            allocation=period.allocation,
            predicted_seconds=period.predicted.step,
            measured_seconds=fmean(period.seconds),
            predicted_bottleneck=period.predicted.bottleneck,
            switching=period.switching,
            priced_seconds=period.priced.step,
        )
        self._number += 1
        if not record.switching:
            found = measured(period.seconds)
            self._settle(found, without_change)
            again = hindsight() or period.priced
            untried = self._last_steady is not None and self._last_steady.allocation != period.allocation
            bias = self._learn(again, found, untried)
            learned = {name: Learned(bias.factor(name), bias.error(name)) for name in BOTTLENECKS}
            self._last_steady = record = replace(
                record, measured_error=found.error, hindsight_seconds=again.step, learned=learned
            )
        self._recorder.period(record)

    def decided(self, record: DecisionRecord) -> None:
        """Record a decision. If its change is made, the decision waits for the first settled period after it."""
        self._recorder.decision(record)
        if record.taken:
            self._waiting = record

    def carried_out(self, seconds: float) -> None:
        """Record that the moves of the change are done, and took `seconds` seconds."""
        if self._waiting is not None:
            self._waiting = replace(self._waiting, measured_cost=seconds)
            self._recorder.decision(self._waiting)

    def dropped(self) -> None:
        """Record that the change was not carried out, so that no measurement counts as its outcome."""
        self._waiting = None

    def _settle(self, found: PeriodSeconds, without_change: Callable[[], Stayed | None]) -> None:
        waiting = self._waiting
        if waiting is None or waiting.measured_cost is None:
            return
        # The work drifts, so the step time before the change does not measure the old allocation's time now.
        stayed = without_change()
        self._waiting, judged = None, replace(waiting, measured_after=found.seconds)
        if stayed is not None:
            judged = replace(
                judged,
                realised_gain_per_step=stayed.seconds - found.seconds,
                realised_error=math.hypot(stayed.error, found.error),
            )
        self._recorder.decision(judged)
