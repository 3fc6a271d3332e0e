"""One optimiser step over several replicas: how its batch is divided, and what came of it.

Invariant: every sample is in exactly one share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from libra.backends.transport.trainer_messages import Reduced, Sample, Trained

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica did of a step."""

    replica: str
    compute_seconds: float
    exchange_seconds: float  # the wait for the slowest one included


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimiser step over all replicas. Seconds are those of the slowest replica unless said otherwise."""

    version: int
    checksum: int
    buffer: int
    replicas: int
    wall_seconds: float  # as the controller saw it
    compute_seconds: float
    exchange_seconds: float
    publish_seconds: float  # the new weights written for the engines
    forward_tokens: int
    generated_tokens: int
    clip_share: float
    behaviour_weight_mean: float
    prox_gap_mean: float
    gradient_norm: float
    held_seconds: float = 0.0  # before it began: the step boundary was held for somebody else
    redone_seconds: float = 0.0  # then: attempts that failed with a loss, and regrouping
    shares: tuple[Share, ...] = ()


def summarise(
    votes: Sequence[Reduced],
    trained: Trained,
    checksum: int,
    buffer: int,
    wall_seconds: float,
    publish_seconds: float,
) -> StepResult:
    """A committed step, from the votes of all its replicas and the answer of one that stepped."""
    generated = sum(vote.generated_tokens for vote in votes)
    return StepResult(
        version=trained.version,
        checksum=checksum,
        buffer=buffer,
        replicas=len(votes),
        wall_seconds=wall_seconds,
        compute_seconds=max(vote.compute_seconds for vote in votes),
        # Waiting for others in the exchange is not part of it: it takes as long as for the last replica to come.
        exchange_seconds=min(vote.exchange_seconds for vote in votes),
        publish_seconds=publish_seconds,
        forward_tokens=sum(vote.forward_tokens for vote in votes),
        generated_tokens=generated,
        clip_share=sum(vote.clipped for vote in votes) / max(generated, 1),
        behaviour_weight_mean=sum(vote.behaviour_weight for vote in votes) / generated if generated else 1.0,
        prox_gap_mean=sum(vote.prox_gap for vote in votes) / max(generated, 1),
        gradient_norm=trained.gradient_norm,
    )


def split_evenly(samples: list[Sample], parts: int) -> list[list[Sample]]:
    """Samples to replicas so that their tokens are nearly equal."""
    return split_by(samples, parts, lambda sample: len(sample.tokens))


def split_by(items: Sequence[Item], parts: int, size: Callable[[Item], int]) -> list[list[Item]]:
    """Parts of nearly equal size: the largest first, each to the part that has the least."""
    shares: list[list[Item]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for item in sorted(items, key=lambda item: -size(item)):
        lightest = loads.index(min(loads))
        shares[lightest].append(item)
        loads[lightest] += size(item)
    return shares


def tokens_of(share: Sequence[Sample]) -> int:
    """Tokens that go through the model, before padding."""
    return sum(len(sample.tokens) for sample in share)
