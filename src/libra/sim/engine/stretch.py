"""Consecutive iterations that only generate: when each of them ends, without visiting it.

Invariant: the end of the k-th iteration is one formula in whole numbers, wherever it is asked for; so a stretch that is
cut short ends exactly where an iteration would have.
"""

from __future__ import annotations

from math import sqrt

from libra.sim.engine.iteration_cost import IterationCost

Piece = tuple[int, int, int, int]  # iterations before it; its start, the ticks of its first one, and their growth


def stretch(cost: IterationCost, now: int, decoding: int, context: int, steps: int) -> tuple[list[Piece], int]:
    """Pieces in which the ticks of an iteration grow evenly, and the tick at which `steps` >= 1 iterations end."""
    pieces: list[Piece] = []
    before = 0
    while True:
        base, slope, limit = cost.line(decoding, context)
        first, growth = base + slope * context, slope * decoding
        count = steps - before
        if context + count * decoding > limit:
            count = -(-(limit - context) // decoding)
        pieces.append((before, now, first, growth))
        now += count * first + growth * (count * (count - 1) // 2)
        before += count
        if before == steps:
            return pieces, now
        context += count * decoding


def cut(pieces: list[Piece], steps: int, now: int) -> tuple[int, int]:
    """(iterations, end) of a stretch of `steps` that stops at its first end at or after `now`, which is in it. Pieces
    after that are removed."""
    while len(pieces) > 1 and pieces[-1][1] >= now:
        steps = pieces.pop()[0]
    before, start, first, growth = pieces[-1]
    count = _least_steps(first, growth, now - start, steps - before)
    return before + count, start + ticks_of(count, first, growth)


def end_of(pieces: list[Piece], steps: int) -> int:
    """The tick at which the first `steps` >= 1 iterations have ended."""
    before, start, first, growth = next(piece for piece in reversed(pieces) if piece[0] < steps)
    return start + ticks_of(steps - before, first, growth)


def ticks_of(steps: int, first: int, growth: int) -> int:
    """Of iterations of which the first takes `first` ticks and each other `growth` more than the one before."""
    return steps * first + growth * (steps * (steps - 1) // 2)


def _least_steps(first: int, growth: int, ticks: int, most: int) -> int:
    """Least steps from 1 to `most` that take `ticks` or more; `most` if none does. A guess, mended in whole numbers."""
    if growth:
        half = first - growth / 2
        steps = int(2.0 * ticks / (half + sqrt(max(0.0, half * half + 2.0 * growth * ticks))))
    else:
        steps = ticks // first
    steps = min(max(steps, 1), most)
    while steps > 1 and ticks_of(steps - 1, first, growth) >= ticks:
        steps -= 1
    while steps < most and ticks_of(steps, first, growth) < ticks:
        steps += 1
    return steps
