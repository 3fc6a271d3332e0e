"""The allowed effort of comparing plans by simulation."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from libra.choose.race import MOST_SAMPLES


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits, processes and seed of a comparison by simulation. With `seconds` inf the same arguments give the same
    result on any machine."""

    seconds: float = inf  # wall time of the race; inf: until it is decided
    jobs: int = 1  # processes
    seed: int = 0  # of the draws, and of policies that draw
    samples: int = MOST_SAMPLES  # of a plan in the race, at most

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}; a plan needs 1 or more to be compared")
