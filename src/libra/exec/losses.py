"""How long a loss is remembered of a place that is used again, until it has lost too many.

What is lost now and then may pass. Several losses within an hour have a cause that starting again does not remove.
Three starts that hang for the 120 s that they have fit into the hour.
"""

from __future__ import annotations

LOSS_WINDOW = 3600.0  # seconds


def with_loss(losses: tuple[float, ...], now: float) -> tuple[float, ...]:
    """The losses that count, by their moments, with one more at `now`."""
    return (*(moment for moment in losses if now - moment <= LOSS_WINDOW), now)
