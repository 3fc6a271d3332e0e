"""The slowest of several engines in each of the following iterations: the upper envelope of their lines.

Invariant: whole ticks; the envelope is the largest line at every iteration, wherever it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from libra.sim.engine.speculative import Ints


def corners(first: Ints, growth: Ints, steps: int) -> Iterator[tuple[int, int, int, int]]:
    """(iterations, ticks of the first, growth, line) of the pieces of the envelope over `steps` >= 1 iterations. Line
    `i` takes `first[i] + k * growth[i]` ticks in iteration `k`; of several equally large ones, the one that grows least
    is named."""
    at = 0
    while at < steps:
        values = first + growth * at
        top = values.max()
        of_top = values == top
        flattest = growth[of_top].min()
        steeper = growth > flattest
        done = steps - at
        if done > 1 and steeper.any():
            # The first iteration in which a steeper line is above: the quotient, rounded down, plus one.
            done = min(done, int(((top - values[steeper]) // (growth[steeper] - flattest)).min()) + 1)
        yield done, int(top), int(flattest), int((of_top & (growth == flattest)).argmax())
        at += done


def scaled(ticks: Ints, growth: Ints, lines: tuple[tuple[int, int], ...]) -> tuple[Ints, Ints]:
    """Lines of whole iterations, from lines of the engines' own parts, which take `ticks` and grow by `growth`. For
    each engine's part `own`, the iteration takes the longest of `factor * own + more` over all (factor, more) of
    `lines`."""
    if len(lines) == 1 and lines[0][0] == 1:
        return ticks + lines[0][1], growth
    return (
        np.concatenate([factor * ticks + more for factor, more in lines]),
        np.concatenate([factor * growth for factor, _ in lines]),
    )
