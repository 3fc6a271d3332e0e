"""Quantities written with their unit, such as `200 Gb/s` or `80 GiB`.

Invariant: every number needs a unit, and bits and bytes are never confused: `b` and `B` differ by eight. Sizes become
bytes, rates bytes per second, speeds FLOP per second, durations seconds. Only a duration may have no unit: it is in
seconds, if the number is plausible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from math import inf, nextafter

_BIT = 1 / 8

SIZES: Mapping[str, float] = {"GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
RATES: Mapping[str, float] = {
    **{f"{prefix}B/s": scale for prefix, scale in (("G", 1e9), ("T", 1e12), ("M", 1e6))},
    **{
        f"{prefix}{bits}": scale * _BIT
        for bits in ("b/s", "bit/s", "bps")
        for prefix, scale in (("G", 1e9), ("T", 1e12), ("M", 1e6))
    },
}
SPEEDS: Mapping[str, float] = {"TFLOP/s": 1e12, "PFLOP/s": 1e15, "TFLOPS": 1e12, "PFLOPS": 1e15}

DURATIONS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
# Longest latency limit, in seconds, that a number without a unit may give: a larger number was probably meant as
# milliseconds.
PLAUSIBLE: Mapping[str, float] = {"ttft": 60.0, "tpot": 2.0, "latency": 3_600.0}

_NUMBER = re.compile(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z][A-Za-z/]*)\s*")


def quantity(field: str, given: object, units: Mapping[str, float]) -> float:
    """Parse the text `given` for `field` into base units. Raises a ValueError that lists the known units.

    >>> quantity("link", "400 Gb/s", RATES) == quantity("link", "50 GB/s", RATES) == 50e9
    True
    """
    understood = ", ".join(units)
    if isinstance(given, (int, float)):
        raise ValueError(f"{field} is {given!r:.40} without a unit; add one of {understood}")
    match = _QUANTITY.fullmatch(given) if isinstance(given, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"{field} is {given!r:.40}; write a number and one of {understood} (b is a bit, B a byte)")
    return float(match[1]) * units[match[2]]


def duration(field: str, given: str, plausible: float = inf) -> float:
    """Parse seconds from a text such as `50ms`, `1s` or `0.05` (seconds). Raises a ValueError that names the field,
    also if a number without a unit is more than `plausible`.

    >>> duration("ttft", "50ms"), duration("ttft", "1.5")
    (0.05, 1.5)
    """
    match = _NUMBER.fullmatch(given)
    if match is None or (match[2] and match[2] not in DURATIONS):
        raise ValueError(f"{field} is {given!r:.40}; give seconds, or a number and one of {', '.join(DURATIONS)}")
    number, unit = match.groups()
    value = float(number)
    if not unit and value > plausible:
        raise ValueError(f"{field} is {number} seconds, which is long; write {number}ms or {number}s")
    return value * DURATIONS[unit or "s"]


def written(value: float, units: Mapping[str, float]) -> str:
    """The shortest text that `quantity` reads as exactly this value, which is above 0. Raises ValueError if there is no
    such text.

    >>> written(50e9, RATES), written(81_559 * 2.0**20, SIZES)
    ('50 GB/s', '81559 MiB')
    """
    texts = []
    for unit, scale in units.items():
        near = value / scale
        for number in (near, nextafter(near, 0), nextafter(near, inf)):
            text = f"{Decimal(repr(number)):f}".removesuffix(".0")
            if float(text) * scale == value:
                texts.append(f"{text} {unit}")
    if not texts:
        raise ValueError(f"{value!r} cannot be written exactly in any of {', '.join(units)}: round it")
    return min(texts, key=len)


def rate(value: float) -> str:
    """Text of a rate in bytes and in bits per second."""
    return f"{value / 1e9:g} GB/s ({value * 8 / 1e9:g} Gb/s)"
