"""A recent ratio of two quantities.

Invariant: it is a ratio of sums, so a small step counts little, whatever its own ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

_HALF_LIFE_STEPS = 5.0  # what is measured drifts as the policy learns


@dataclass(slots=True)
class Ratio:
    """An exponentially forgotten ratio of sums; 1 before any observation."""

    above: float = 0.0
    below: float = 0.0

    def observe(self, above: float, below: float) -> None:
        keep = 0.5 ** (1 / _HALF_LIFE_STEPS)
        self.above, self.below = keep * self.above + above, keep * self.below + below

    @property
    def value(self) -> float:
        return self.above / self.below if self.below else 1.0
