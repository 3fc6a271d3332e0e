"""The upper envelope of the lines of several engines: the ticks of the slowest engine in each coming iteration.

Invariant: ticks are whole numbers. In every iteration the envelope equals the largest line, even if the iterations are
split in parts and each part has its own envelope.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from libra.sim.engine.speculative import Ints


def corners(first: Ints, growth: Ints, steps: int) -> Iterator[tuple[int, int, int, int]]:
    """(iterations, ticks of the first, growth, line) of the pieces of the envelope over `steps` >= 1 iterations. Line
    `i` takes `first[i] + k * growth[i]` ticks in iteration `k`. If several lines are equally large, the piece names the
    line that grows least."""
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
    """Lines of whole iterations. An engine's own part takes `ticks` in the first iteration, and grows by `growth`. An
    iteration takes the largest `factor * own + more` over all (factor, more) of `lines`, where `own` are the ticks of
    an engine's own part."""
    if len(lines) == 1 and lines[0][0] == 1:
        return ticks + lines[0][1], growth
    return (
        np.concatenate([factor * ticks + more for factor, more in lines]),
        np.concatenate([factor * growth for factor, _ in lines]),
    )
