"""What one iteration of an engine takes.

Invariant: whole ticks, and for decoding alone exactly linear in the context between two knots, so that the sum over
many iterations is known without visiting each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Chunk = tuple[int, int]  # prefill of one request: (new tokens, tokens of its context before them)

UNLIMITED = 1 << 62


class IterationCost(Protocol):
    """Decoding requests generate one token each; `context` is the sum of the tokens they attend to, the new too."""

    def line(self, decoding: int, context: int) -> tuple[int, int, int]:
        """(base, slope, limit): an iteration that only decodes takes `base + slope * context` ticks, > 0.

        This holds from the given context up to `limit` (exclusive). `decoding` >= 1.
        """
        ...

    def mixed(self, decoding: int, context: int, chunks: Sequence[Chunk]) -> int:
        """Ticks > 0 of an iteration with one prefill chunk or more. `decoding` >= 0."""
        ...


@dataclass(frozen=True, slots=True)
class AffineCost:
    """Ticks of an iteration that is affine in everything: for tests, and for engines measured to be so."""

    step: int
    per_sequence: int = 0  # of those that decode
    per_context_token: int = 0
    per_new_token: int = 0  # of prefill
    per_pair: int = 0  # for each pair of a new token and one it attends to, itself too

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"AffineCost.step is {self.step} ticks; an iteration takes 1 or more")

    def line(self, decoding: int, context: int) -> tuple[int, int, int]:
        return self.step + self.per_sequence * decoding, self.per_context_token, UNLIMITED

    def mixed(self, decoding: int, context: int, chunks: Sequence[Chunk]) -> int:
        ticks = self.step + self.per_sequence * decoding + self.per_context_token * context
        for new, before in chunks:
            ticks += self.per_new_token * new + self.per_pair * (new * before + new * (new + 1) // 2)
        return ticks
