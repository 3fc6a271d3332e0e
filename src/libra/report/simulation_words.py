"""Numbers of a simulation as a person reads them.

Invariant: a metric is written in its definition's unit, with three digits where it is measured and all where it is
counted; what does not exist is a dash.
"""

from __future__ import annotations

from libra.report.words import count, duration, percent, plain
from libra.sim.outcome.definitions import Unit

MISSING = "-"


def fine_duration(seconds: float) -> str:
    """
    >>> [fine_duration(s) for s in (0, 3.2e-8, 0.00082, 0.0123, 12.34, 7500)]
    ['0 s', '0.032 µs', '820 µs', '12.3 ms', '12.3 s', '2 h 05 min']
    """
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.9995e-3:
        return f"{plain(seconds * 1e6)} µs"
    return f"{plain(seconds * 1e3)} ms" if abs(seconds) < 0.9995 else duration(seconds)


def worded(value: float | None, unit: Unit) -> str:
    """
    >>> worded(0.5, "share"), worded(7595.9, "tokens/s"), worded(3, "count"), worded(None, "s")
    ('50.0 %', '7,596 tokens/s', '3', '-')
    """
    if value is None:
        return MISSING
    match unit:
        case "s":
            return fine_duration(value)
        case "share":
            return percent(value)
        case "tokens/s" | "requests/s":
            return f"{plain(value)} {unit}"
        case "ratio":
            return plain(value)
        case "count" | "tokens":
            return count(value)
