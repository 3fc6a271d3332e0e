"""Checks that values of this folder share."""

from __future__ import annotations


def require_at_least(minimum: int, **fields: int) -> None:
    """Raise ValueError naming the first of `fields` that is below `minimum`."""
    for field, value in fields.items():
        if value < minimum:
            raise ValueError(f"{field} is {value}; set it to {minimum} or more")
