"""Checks for the values of this package."""

from __future__ import annotations


def require_at_least(minimum: int, **fields: int) -> None:
    """Raise `ValueError` with the name of the first field below `minimum`."""
    for field, value in fields.items():
        if value < minimum:
            raise ValueError(f"{field} is {value}; set it to {minimum} or more")
