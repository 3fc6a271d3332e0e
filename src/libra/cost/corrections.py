"""What closed forms of batches are multiplied by, so that they come near the simulated seconds.

Invariant: each factor corrects one named mechanism of `libra.cost.rollout`, and all are fitted together, on families of
trajectories and seeds that no test uses: `python -m benchmarks.rollout_price --fit` says how far and writes them here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class BatchFactors:
    """Factors of the parts of a step's seconds; the parts are those of `batch_work` and `batch_alone`."""

    # Generation of others slows the longest trajectory while it generates itself, but not while its tools run.
    decode: float  # of all, where the longest uses no tools
    decode_beside_tools: float  # of all, where the longest only waits for tools and batches do not overlap
    prefill: float  # samples of one prompt prefill it together; and it, too, runs while tools do
    eviction: float  # contexts that are prefilled again: those of the longer trajectories are gone more often
    memory: float  # waiting for memory, which others use meanwhile
    generation: float  # of the longest trajectory: as the batch drains, and its draws are not normal
    tools: float  # of the longest trajectory
    overlapping: Self | None = None  # those of batches that overlap; None: the same

    def at(self, staleness: int) -> BatchFactors:
        """Those of batches that start so many versions ahead."""
        return self.overlapping if staleness and self.overlapping is not None else self


UNCORRECTED = BatchFactors(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

# The price lets others slow the longest trajectory while it generates, so what others generate counts the same whether
# it uses tools or not.
OVERLAP = BatchFactors(
    decode=1.04,
    decode_beside_tools=1.04,
    prefill=1.21,
    eviction=1.02,
    memory=0.8,
    generation=0.93,
    tools=1.06,
)

BATCH = BatchFactors(
    decode=0.92,
    decode_beside_tools=0.26,
    prefill=0.73,
    eviction=1.6,
    memory=0.39,
    generation=0.98,
    tools=0.98,
    overlapping=OVERLAP,
)
