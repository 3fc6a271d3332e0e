"""Factors that fit formulas for batches to simulated seconds.

Invariant: each factor corrects one mechanism of `libra.cost.rollout`. All factors are fitted together, on trajectories
and seeds that no test uses; `python -m benchmarks.rollout_price --fit` writes them here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchFactors:
    """Factors for the parts of a step in `libra.cost.rollout` and `libra.cost.longest`."""

    decode: float  # decoding of all trajectories
    prefill: float  # samples of one prompt share its prefill
    eviction: float  # contexts that are prefilled again; longer trajectories are evicted more often
    memory: float  # waiting for KV memory, while other sequences use the engine
    generation: float  # generation of the longest trajectory, as the batch drains


UNCORRECTED = BatchFactors(1.0, 1.0, 1.0, 1.0, 1.0)

BATCH = BatchFactors(
    decode=0.92,
    prefill=0.95,
    eviction=1.0,
    memory=0.46,
    generation=0.99,
)
