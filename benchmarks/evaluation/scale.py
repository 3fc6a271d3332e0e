"""Axes: a range of numbers, its round ticks, and where a number lands on the sheet; linear and logarithmic.

Every axis has a label that names its unit, its ticks lie inside its range, and the range is never empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_TICKS = 10  # of 1, 2 and 5 times powers of ten; where more would be needed, the powers alone


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
        """Paper coordinate of `value`, given those of the two ends of the axis."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)

    def tick_labels(self) -> tuple[str, ...]:
        """One text a tick, all with the same decimals; `k` for thousands from 10,000 on, `M` from a million on."""
        largest = max((abs(tick) for tick in self.ticks), default=0.0)
        scale, suffix = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1.0, "")
        steps = [b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)]
        step = min(steps, default=1.0) / scale
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return tuple(f"{tick / scale:,.{decimals}f}{suffix if tick else ''}" for tick in self.ticks)


@dataclass(frozen=True, slots=True)
class LogAxis(Axis):
    """Equal steps are equal factors; both ends are above zero."""

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ValueError(f"axis {self.label!r}: a logarithm needs 0 < low {self.low} < high {self.high}")

    def place(self, value: float, start: float, end: float) -> float:
        if value <= 0:
            raise ValueError(f"axis {self.label!r}: {value} has no place on a logarithmic axis; leave it out")
        return start + math.log(value / self.low) / math.log(self.high / self.low) * (end - start)

    def tick_labels(self) -> tuple[str, ...]:
        """Short, each in the unit that suits it: 0.5, 20, 4k, 1M."""
        return tuple(_short(tick) for tick in self.ticks)


def measured_axis(label: str, values: Iterable[float], wanted_ticks: int = 5) -> Axis:
    """An axis from zero (or below, for negative values) to the first round number above the values."""
    values = tuple(values)
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    if high == low:
        high = low + 1.0
    step = round_step(high - low, wanted_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(label, first * step, last * step, tuple(_clean(i * step) for i in range(first, last + 1)))


def round_step(span: float, wanted: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most `wanted` pieces."""
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * (1 - 1e-9))


def log_axis(label: str, values: Iterable[float]) -> LogAxis:
    """From the round number (1, 2 or 5 times a power of ten) below the values to the one above them."""
    values = tuple(values)
    if not values or min(values) <= 0:
        raise ValueError(f"axis {label!r}: values are {values}; a logarithm needs positive ones")
    # A power more at both ends than the logarithms say: they are rounded.
    powers = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    steps = [float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5)]
    low = max(step for step in steps if step <= min(values))
    high = next(step for step in steps if step >= max(values) and step > low)
    ticks = [step for step in steps if low <= step <= high]
    if len(ticks) > _TICKS:
        ticks = [step for step in ticks if f"{step:e}".startswith("1.")]
    return LogAxis(label, low, high, tuple(ticks))


def doubling_axis(label: str, low: float, high: float) -> LogAxis:
    """From `low` to `high`, with a tick at `low` and wherever it has doubled: for lengths in tokens."""
    count = math.floor(math.log2(high / low) + 1e-9)
    return LogAxis(label, low, high, tuple(low * 2**power for power in range(count + 1)))


def _short(number: float) -> str:
    if number >= 1024 and number % 1024 == 0:
        return f"{number / 1024:,.0f}K"
    scale, suffix = (1e6, "M") if number >= 1e6 else (1e3, "k") if number >= 1e4 else (1.0, "")
    return f"{number / scale:,.12g}{suffix}"


def _clean(number: float) -> float:
    return float(f"{number:.12g}")  # 3 * 0.1 is a tick at 0.3
