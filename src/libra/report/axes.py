"""Axes: a range of numbers, its round ticks, and where a number lands on paper.

Invariant: every axis has a label that names its unit, its ticks lie inside its range, and the range is never empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"axis {self.label!r}: low {self.low} must be below high {self.high}")

    def place(self, value: float, start: float, end: float) -> float:
        """Where `value` lands between the paper coordinates of the two ends of the axis."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)

    def tick_labels(self) -> tuple[str, ...]:
        """One text a tick, all with the same decimals; `k` for thousands from 10,000 on, `M` from a million on."""
        largest = max((abs(tick) for tick in self.ticks), default=0.0)
        scale, suffix = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1.0, "")
        steps = [b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)]
        step = min(steps, default=1.0) / scale
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return tuple(f"{tick / scale:,.{decimals}f}{suffix if tick else ''}" for tick in self.ticks)


def measured_axis(label: str, values: Iterable[float], wanted_ticks: int = 5) -> Axis:
    """An axis from zero (or below, for negative values) to the first round number above the values."""
    values = tuple(values)
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    if high == low:
        high = low + 1.0
    step = round_step(high - low, wanted_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(label, first * step, last * step, tuple(_clean(i * step) for i in range(first, last + 1)))


def running_axis(label: str, low: float, high: float, wanted_ticks: int = 6, whole: bool = False) -> Axis:
    """An axis that ends where the data end; `whole` keeps the ticks on whole numbers."""
    if high <= low:
        low, high = low - 0.5, low + 0.5
    step = round_step(high - low, wanted_ticks)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(label, low, high, tuple(_clean(i * step) for i in range(first, last + 1)))


def round_step(span: float, wanted: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most `wanted` pieces."""
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Seconds in the unit in which a time axis of this length is best read, and the unit's name."""
    if longest_seconds <= 180:
        return 1.0, "s"
    return (60.0, "min") if longest_seconds <= 3 * 3600 else (3600.0, "h")


def _clean(number: float) -> float:
    return float(f"{number:.12g}")  # 3 * 0.1 is a tick at 0.3
