"""Numbers as text, with units and rounded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.markup import escape

if TYPE_CHECKING:  # light import, since every command uses this module for errors
    from libra.plan.solution import Bottleneck, StepPart
    from libra.sim.outcome.definitions import Unit

MISSING = "-"
BOTTLENECK_WORDS: dict[Bottleneck, str] = {
    "rollout": "generation",
    "training": "training",
    "latency": "the latency of a batch",
}
PART_WORDS: dict[StepPart, str] = {
    "rollout": "generation",
    "training": "training",
    "latency": "the longest episodes",
    "publication": "publication of weights",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Text from a file, made safe for a terminal: control characters are escaped, since they could move the cursor,
    rename the window or reverse the line.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def cell(text: str) -> str:
    """Printable text as a cell of a rich table, with brackets escaped."""
    return escape(printable(text))


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0.0421, 12.34, 432, 7500)]
    ['0.042 s', '12.3 s', '7 min 12 s', '2 h 05 min']
    """
    sign, seconds = ("-" if seconds < 0 else ""), abs(seconds)
    if seconds < 59.95:
        return f"{sign}{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{sign}{minutes // 60} h {minutes % 60:02d} min"


def days(seconds: float) -> str:
    """A long duration, in days.

    >>> [days(s) for s in (7500, 2.5 * 86_400)]
    ['2 h 05 min', '2.50 days']
    """
    return duration(seconds) if seconds < 2 * 86_400 else f"{_three_digits(seconds / 86_400)} days"


def dollars(amount: float) -> str:
    """
    >>> [dollars(it) for it in (0.0123, 4.567, 12_345.6)]
    ['$0.012', '$4.57', '$12,346']
    """
    return f"${amount:,.0f}" if amount >= 99.95 else f"${_three_digits(amount)}"


def signed_duration(seconds: float) -> str:
    return ("+" if seconds > 0 else "") + duration(seconds)


def percent(share: float, digits: int = 1) -> str:
    """
    >>> percent(0.391)
    '39.1 %'
    """
    return f"{100 * share:.{digits}f} %"


def signed_percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:+.{digits}f} %"


def count(number: float) -> str:
    """
    >>> count(12345.4)
    '12,345'
    """
    return f"{number:,.0f}"


def size(number_of_bytes: float) -> str:
    """
    >>> size(3 * 2**30), size(1085 * 2**30)
    ('3.00 GiB', '1.06 TiB')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number_of_bytes >= scale:
            return f"{_three_digits(number_of_bytes / scale)} {unit}"
    return f"{number_of_bytes:.0f} B"


def plain(number: float) -> str:
    """Three significant digits, thousands separated, no unit.

    >>> [plain(n) for n in (0.03912, 2.5, 1234.5, 0)]
    ['0.0391', '2.5', '1,234', '0']
    """
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """
    >>> plural(1, "step"), plural(2, "loss", "losses")
    ('1 step', '2 losses')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def per_second(rate: float, noun: str = "request") -> str:
    """
    >>> per_second(1.0), per_second(1234.5)
    ('1 request/s', '1,234 requests/s')
    """
    number = plain(rate)
    return f"{number} {noun if number == '1' else noun + 's'}/s"


def fine_duration(seconds: float) -> str:
    """Text of a short duration. Values below a nanosecond are rounding errors of sums, and shown as 0.

    >>> [fine_duration(s) for s in (0, 2.9e-11, 3.2e-8, 0.00082, 0.0123, 12.34, 7500)]
    ['0 s', '0 s', '0.032 µs', '820 µs', '12.3 ms', '12.3 s', '2 h 05 min']
    """
    if abs(seconds) < 1e-9:
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


def _three_digits(number: float) -> str:
    decimals = 0 if number >= 99.95 else 1 if number >= 9.995 else 2 if number >= 0.0995 or number == 0 else 3
    return f"{number:.{decimals}f}"
