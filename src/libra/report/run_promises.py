"""Predictions of a run: price, prediction, measured seconds and learned bias of each period."""

from __future__ import annotations

from collections.abc import Iterable

from libra.records.schema import PeriodRecord
from libra.report.words import BOTTLENECK_WORDS, MISSING, duration, signed_percent


def promise_rows(periods: Iterable[PeriodRecord]) -> list[tuple[str, ...]]:
    """Steps, allocation, price, prediction, measurement, error of the prediction, and the learned factors."""
    return [_row(period) for period in periods]


def _row(period: PeriodRecord) -> tuple[str, ...]:
    first, last = period.first_step, period.last_step
    took = duration(period.measured_seconds)
    if period.measured_error is not None:
        took += f" ± {duration(2 * period.measured_error)}"
    factors = (
        f"{BOTTLENECK_WORDS[name]} × {it.factor:.2f} ± {200 * it.error:.0f} %" for name, it in period.learned.items()
    )
    return (
        f"{first}" if first == last else f"{first}–{last}",
        period.allocation,
        MISSING if period.priced_seconds is None else duration(period.priced_seconds),
        duration(period.predicted_seconds),
        took,
        "a worker changed role" if period.switching else signed_percent(period.relative_error),
        ", ".join(factors) or "nothing",
    )
