"""Colours that readers with any colour vision can tell apart.

Invariant: neighbours in the list differ in lightness, too, so that they stay apart in print.
"""

from __future__ import annotations

# Okabe and Ito 2008, "Color Universal Design", without yellow, which a light background swallows.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7", "#000000")
# Systems that figures show keep their colour from figure to figure.
SYSTEMS = ("colocated", "even", "greedy", "static", "published", "ours", "oracle")
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#dfe3e8", "#ffffff"


def colour(number: int) -> str:
    """Colour of series `number`, counted from 0. Raises ValueError where there are more series than colours."""
    if not 0 <= number < len(PALETTE):
        raise ValueError(f"series {number + 1} has no colour of its own: show {len(PALETTE)} or fewer in one figure")
    return PALETTE[number]


def number_of(system: str) -> int:
    """Number of the colour that `system`, one of `SYSTEMS`, has."""
    return SYSTEMS.index(system)
