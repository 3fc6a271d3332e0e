"""A recent ratio of two quantities.

Invariant: the result is a ratio of sums, so a short step has little weight.
"""

from __future__ import annotations

from dataclasses import dataclass

_HALF_LIFE_STEPS = 5.0  # measured quantities drift as the policy learns


@dataclass(slots=True)
class Ratio:
    """A ratio of sums in which old observations have exponentially less weight; 1 before any observation."""

    above: float = 0.0
    below: float = 0.0

    def observe(self, above: float, below: float) -> None:
        keep = 0.5 ** (1 / _HALF_LIFE_STEPS)
        self.above, self.below = keep * self.above + above, keep * self.below + below

    @property
    def value(self) -> float:
        return self.above / self.below if self.below else 1.0
