"""The answer to a planning problem: an allocation, its price, and what is proven of it. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.plan.allocation import Allocation

Bottleneck = Literal["rollout", "training", "latency"]  # which of the three a step is as long as; see `Prediction`
StepPart = Literal["rollout", "training", "latency", "publication"]  # what the seconds of a step go to
SolverStatus = Literal["optimal", "feasible"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of one optimiser step, and what bounds it."""

    step: float  # the largest of the three below
    # The busiest bucket's work for one step's trajectories, per engine, weight loads included; where the step is
    # synchronous, the longest trajectory of a batch, too
    rollout: float
    training: float  # forward, backward, exchange, optimiser, exposed publication
    latency: float  # (longest residence + what follows it) / (1 + staleness); synchronous, of load where longer
    bottleneck: Bottleneck  # the field above that the step is as long as; the first one where several are
    # Seconds between which steps alternate, with `step` as their mean: where batches overlap and the longest trajectory
    # is the largest part of a latency that is the bottleneck, those it holds end together, and start together from
    # then on. Else None
    step_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Proof:
    """What the solver can vouch for. `bound` is a proven lower bound on the step seconds, `gap` relative to it."""

    status: SolverStatus
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The best allocation of a problem, its price and the proof."""

    allocation: Allocation
    predicted: Prediction
    proof: Proof
