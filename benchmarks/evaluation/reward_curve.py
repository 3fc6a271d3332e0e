"""Reward against wall clock, as a function of what was trained on and how stale it was.

Invariant: the same function for all systems: reward only rises, and a token is worth the same in each of them.
The growth of reward is an assumption, as a simulation has no policy that learns:

    reward = 1 - exp(-tokens / scale)      tokens = sum over steps of generated tokens / (1 + discount * mean staleness)

Each token of a batch closes the same share of what is left to learn, and is worth the less the staler the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


def worth(tokens: Sequence[float], staleness: Sequence[float], discount: float) -> list[float]:
    """Tokens until each step, those of stale batches discounted. Raises ValueError for a discount below 0."""
    if discount < 0:
        raise ValueError(f"discount is {discount}; give 0 (stale tokens are worth as much) or more")
    return list(accumulate(count / (1 + discount * stale) for count, stale in zip(tokens, staleness, strict=True)))


def reward(tokens: float, scale: float) -> float:
    """Reward from 0 to 1. Raises ValueError for a scale that is not above 0."""
    if scale <= 0:
        raise ValueError(f"scale is {scale} tokens; give more than 0")
    return -math.expm1(-tokens / scale)


def seconds_to(target: float, rewards: Sequence[float], ended: Sequence[float]) -> float | None:
    """End of the first step whose policy has the `target` reward; None where none has."""
    return next((second for found, second in zip(rewards, ended, strict=True) if found >= target), None)
