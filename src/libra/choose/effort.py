"""The effort allowed for comparing plans by simulation."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from libra.choose.race import MOST_SAMPLES


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits, processes and seed of a comparison by simulation. With infinite `seconds`, equal arguments give equal
    results on any machine.
    """

    seconds: float = inf  # wall time of the race; inf: until the race is decided
    jobs: int = 1  # processes
    seed: int = 0  # seed of the draws, and of policies that draw
    samples: int = MOST_SAMPLES  # limit on the samples of a plan in the race

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}; give 1 or more, as a comparison needs samples")
