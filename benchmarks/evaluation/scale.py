"""Axes whose equal steps are equal factors.

Invariant: what `Axis` promises, and both ends are above zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from libra.report.axes import Axis

_TICKS = 10  # of 1, 2 and 5 times powers of ten; where more would be needed, the powers alone


@dataclass(frozen=True, slots=True)
class LogAxis(Axis):
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
