"""The answer to a planning problem: an allocation, its price, and the proof of its bound. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.plan.allocation import Allocation

Bottleneck = Literal["rollout", "training", "latency"]  # the largest of the three seconds; see `Prediction`
StepPart = Literal["rollout", "training", "latency", "publication"]  # parts that the seconds of a step divide into
SolverStatus = Literal["optimal", "feasible"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of one optimiser step, and its bottleneck."""

    step: float  # the largest of the three below
    # Work of each engine of the busiest bucket for one step's trajectories, weight loads included. In a synchronous
    # step it also covers the longest trajectory of the batch.
    rollout: float
    training: float  # forward, backward, exchange, optimiser, exposed publication
    # (longest residence + training and publication after it) / (1 + staleness). In a synchronous step, the load
    # replaces a shorter residence.
    latency: float
    bottleneck: Bottleneck  # the field above that equals `step`; the first one if several do
    # Two durations in seconds between which steps alternate, with `step` as their mean; None: steps do not alternate.
    # They alternate if batches overlap, latency is the bottleneck, and the longest trajectory is its largest part: the
    # batches that this trajectory delays end together, and from then on start together.
    step_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """The solver's proof: `bound` is a proven lower bound on the step's seconds, `gap` the step's share above it."""

    status: SolverStatus
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The best allocation of a problem, its price and the proof."""

    allocation: Allocation
    predicted: Prediction
    proof: Proof
