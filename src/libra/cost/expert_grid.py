"""Times of data-parallel ranks that divide the experts over all their GPUs: each rank's own part, the experts of the
fullest GPU, and the exchange before and after the experts.

Invariant: times are kernel times, and the grid names their sources. A rank's own part is all work except routed
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from libra.cost.grid import EngineGrid

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertGrid:
    """Times of one model on `gpus` GPUs; each rank has one or several GPUs."""

    own: EngineGrid  # a rank's own part
    layers: int  # with experts
    gpus: int
    tokens: tuple[int, ...]  # of each GPU: axis of `experts` and `exchange`
    experts: tuple[float, ...]  # one layer, where all experts are equally frequent
    exchange: tuple[float, ...]  # one layer: dispatch and combine
    expert_bytes: float  # weights of one expert of a layer
    link: float  # bytes/s at which an expert moves to another GPU
    source: str

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or any(low >= high for low, high in pairwise(self.tokens)):
            raise ValueError(f"ExpertGrid.tokens is {self.tokens}; list two or more rising values")
        if not len(self.tokens) == len(self.experts) == len(self.exchange):
            raise ValueError("ExpertGrid.experts and exchange need a time for each of tokens; measure the missing ones")

    def layer_seconds(self, tokens: Seconds) -> Seconds:
        """Seconds of experts and exchange of a layer; `tokens` is the number on the fullest GPU."""
        return self._of(self.experts, tokens) + self._of(self.exchange, tokens)

    def _of(self, seconds: tuple[float, ...], tokens: Seconds) -> Seconds:
        """Interpolate linearly between points; beyond the last point, extrapolate the last interval."""
        axis = self.tokens
        slope = (seconds[-1] - seconds[-2]) / (axis[-1] - axis[-2])
        found: Seconds = np.interp(tokens, axis, seconds) + slope * np.maximum(tokens - axis[-1], 0)
        return found
