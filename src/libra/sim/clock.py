"""Simulated time.

Invariant: time is a whole number of picoseconds. So a sum does not depend on the order of its terms, and two ways to
compute the same instant give the same instant.
"""

from __future__ import annotations

import math

TICKS = 10**12  # ticks in one second
LONGEST = 2**63 / TICKS  # seconds: the longest time in 64 bits


def ticks(seconds: float) -> int:
    """The nearest whole number of ticks. Raises ValueError unless `seconds` is at least 0 and below `LONGEST`."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{seconds} seconds is not a duration: give a finite number, 0 or more")
    if seconds >= LONGEST:
        raise ValueError(f"{seconds:g} seconds is longer than 106 days: give less than {LONGEST:.3g}")
    return round(seconds * TICKS)


def seconds(ticks: int) -> float:
    return ticks / TICKS
