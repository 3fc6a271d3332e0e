"""What a request needs to know of its trajectory classes before it prices them.

Invariant: classes that pass `check_classes` are a distribution: their shares sum to 1, shortest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise

from libra.lengths import TrajectoryClass

SHARE_TOLERANCE = 1e-6  # shares are normalised floats, perhaps printed and read again: they sum to 1 up to rounding


def check_classes(classes: Sequence[TrajectoryClass], longest_context: int) -> None:
    """Raise ValueError with the field and the remedy, unless the classes are a distribution of contexts that fit."""
    if not classes:
        raise ValueError("classes is empty; a workload needs at least one trajectory class")
    for index, cls in enumerate(classes):
        where = f"classes[{index}]"
        if not all(math.isfinite(mean) and mean >= 0 for mean in asdict(cls).values()):
            raise ValueError(f"{where}: {cls} has a negative or infinite field; every mean is finite and >= 0")
        if not 0 <= cls.before_first_return <= 1:
            raise ValueError(f"{where}.before_first_return is {cls.before_first_return}; it is a fraction of 0 to 1")
        if not 1 <= cls.peak_context <= longest_context:
            raise ValueError(
                f"{where}.peak_context is {cls.peak_context}; it lies between 1 and longest_context "
                f"({longest_context}): raise longest_context, or clip the class"
            )
    total = math.fsum(cls.share for cls in classes)
    if abs(total - 1) > SHARE_TOLERANCE:
        raise ValueError(f"classes: the shares sum to {total}; divide each by their sum")
    if any(shorter.peak_context > longer.peak_context for shorter, longer in pairwise(classes)):
        raise ValueError("classes are not ordered; sort them by peak_context, shortest first")


def present(classes: Sequence[TrajectoryClass], trajectories: int) -> tuple[bool, ...]:
    """Which classes are met in a typical step: one trajectory or more is expected to be at least that long."""
    at_least = tuple(accumulate(cls.share for cls in reversed(classes)))[::-1]
    return tuple(trajectories * (share + SHARE_TOLERANCE) >= 1 for share in at_least)


def reach(classes: Sequence[TrajectoryClass], router_hit: float) -> tuple[tuple[float, ...], ...]:
    """[router][class] how much of a class's work reaches its own bucket: for the router as it was seen to hit, and for
    a perfect one.

    All that is generated before the first tool return stays in the first bucket, and so does what the router misses. Of
    buckets that run it is known how well the router hits; how well it would hit others depends on where they lie, so
    they must have time for a perfect one, too.
    """
    hits = (router_hit,) if router_hit == 1 else (router_hit, 1.0)
    return tuple(tuple((1 - cls.before_first_return) * hit for cls in classes) for hit in hits)
