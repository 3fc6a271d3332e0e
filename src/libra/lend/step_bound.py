"""Upper bound on the time of a step, from the times of recent steps.

Invariant: a wrong prediction reduces the lent time, but never causes a missed SLO. The bound is the prediction times a
ratio of actual to predicted time of recent steps. If coming steps resemble recent steps, at most the share `missed` of
them exceeds that ratio.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque


class StepBound:
    """The prediction times the k-th smallest of the last n ratios of actual to predicted seconds.

    k = ceil((n + 1) * (1 - missed)): the last of n + 1 exchangeable ratios exceeds the k-th smallest of the others with
    a probability of at most `missed` (split conformal prediction, Vovk et al. 2005). So nothing is bounded before
    `1 / missed - 1` steps were seen.
    """

    def __init__(self, missed: float = 0.0025, memory: int = 1600) -> None:
        if not 0 < missed < 1:
            raise ValueError(
                f"missed is {missed:g}; the share of steps that may exceed the bound is above 0 and below 1"
            )
        self.needed = math.ceil(1 / missed) - 1
        if memory < self.needed:
            raise ValueError(
                f"memory is {memory} steps; a bound that {100 * missed:.2f} % of steps may exceed needs"
                f" {self.needed} or more"
            )
        self._missed = missed
        self._recent: deque[float] = deque(maxlen=memory)
        self._sorted: list[float] = []

    def observe(self, predicted: float, actual: float) -> None:
        """Record the predicted and the actual seconds of one step. Raises ValueError unless both are positive and
        finite."""
        if not (0 < predicted < math.inf and 0 < actual < math.inf):
            raise ValueError(f"a step of {actual:g} s, predicted {predicted:g} s; both must be positive and finite")
        ratio = actual / predicted
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(ratio)
        insort(self._sorted, ratio)

    @property
    def factor(self) -> float | None:
        """Factor on predictions; None until enough steps were seen."""
        n = len(self._sorted)
        if n < self.needed:
            return None
        return self._sorted[min(n, math.ceil((n + 1) * (1 - self._missed) - 1e-9)) - 1]

    def kept_by(self, share: float) -> float | None:
        """The ratio that the given share of recent steps did not exceed; None without steps."""
        n = len(self._sorted)
        return self._sorted[min(n, math.ceil(n * share)) - 1] if n else None

    def bound(self, predicted: float) -> float | None:
        """Upper bound on the seconds of a step with this prediction; None until enough steps were seen."""
        factor = self.factor
        return None if factor is None else predicted * factor
