"""Divides work among several replicas, or among the processes of one replica, and merges their answers.

Invariant: every sample is in exactly one share. A merged answer is positive only if all answers are positive, and names
a state only if all have this state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

from msgspec.structs import replace

from libra.backends.protocols import StepResult
from libra.backends.transport.channel import FromWorker, ToWorker
from libra.backends.transport.trainer_messages import (
    Entered,
    Follow,
    MeasureTraining,
    Published,
    Reduced,
    Sample,
    Serving,
    StateDigest,
    TokenSums,
    Train,
    Trained,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)

Item = TypeVar("Item")


def summarise(
    votes: Sequence[Reduced],
    trained: Trained,
    checksum: int,
    buffer: int,
    wall_seconds: float,
    publish_seconds: float,
) -> StepResult:
    """The result of a committed step, from the votes of all its replicas and the answer of a replica that stepped."""
    vote = join_votes(votes)
    sums, generated = vote.sums, vote.sums.generated_tokens
    return StepResult(
        version=trained.version,
        checksum=checksum,
        buffer=buffer,
        replicas=len(votes),
        wall_seconds=wall_seconds,
        compute_seconds=vote.compute_seconds,
        exchange_seconds=vote.exchange_seconds,
        publish_seconds=publish_seconds,
        forward_tokens=sums.forward_tokens,
        generated_tokens=generated,
        clip_share=sums.clipped / max(generated, 1),
        behaviour_weight_mean=sums.behaviour_weight / generated if generated else 1.0,
        prox_gap_mean=sums.prox_gap / max(generated, 1),
        gradient_norm=trained.gradient_norm,
    )


def split_evenly(samples: list[Sample], parts: int) -> list[list[Sample]]:
    """Shares with nearly equal numbers of tokens."""
    return split_by(samples, parts, lambda sample: len(sample.tokens))


def split_by(items: Sequence[Item], parts: int, size: Callable[[Item], int]) -> list[list[Item]]:
    """Parts of nearly equal size: each item, the largest first, goes to the smallest part."""
    shares: list[list[Item]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for item in sorted(items, key=lambda item: -size(item)):
        lightest = loads.index(min(loads))
        shares[lightest].append(item)
        loads[lightest] += size(item)
    return shares


def tokens_of(share: Sequence[Sample]) -> int:
    """Tokens that the model processes, without padding."""
    return sum(len(sample.tokens) for sample in share)


def divide(order: ToWorker, parts: int) -> list[ToWorker]:
    """Divide a replica's order into one order per process, the leader's first. Raises `ValueError` if there are too few
    samples."""
    match order:
        case Train():
            # The loss denominator is the whole batch's: each process sums it with its counterparts in the other
            # replicas.
            return [replace(order, samples=share) for share in split_evenly(order.samples, parts)]
        case WarmUp():
            return [replace(order, batch=order.batch[part::parts]) for part in range(parts)]
        case MeasureTraining():
            # The division is that of samples, so that the measured time is that of a step.
            divided = [split_by(lengths, parts, int) for lengths in order.batches]
            return [replace(order, batches=[shares[part] for shares in divided]) for part in range(parts)]
        case Follow():
            if len(order.places) != parts:
                raise ValueError(
                    f"a replica of {parts} processes cannot follow one of {len(order.places)} processes: all replicas"
                    " must have the same number"
                )
            return [Follow([place]) for place in order.places]
        case _:
            return [order] * parts


def join(answers: Sequence[FromWorker]) -> FromWorker:
    """One answer for all processes: the leader's, which is first, merged with those of the others."""
    kinds = {type(answer) for answer in answers}
    if len(kinds) > 1:
        raise TypeError(f"the processes of a replica answer {', '.join(sorted(kind.__name__ for kind in kinds))}")
    match answers[0]:
        case Reduced():
            return join_votes(cast(Sequence[Reduced], answers))
        case Trained() as led:
            trained = cast(Sequence[Trained], answers)
            return replace(
                led, parameter_hash=_hash(each.parameter_hash for each in trained), diverged=_first_diverged(trained)
            )
        case Published() as led:
            return replace(led, diverged=_first_diverged(cast(Sequence[Published], answers)))
        case TrainingMeasured():
            return _join_measured(cast(Sequence[TrainingMeasured], answers))
        case Entered() as led:
            return replace(led, failure=first_failure(cast(Sequence[Entered], answers)))
        case Serving():
            servings = cast(Sequence[Serving], answers)
            return Serving([port for serving in servings for port in serving.ports], first_failure(servings))
        case StateDigest():
            return _join_digests(cast(Sequence[StateDigest], answers))
        case WarmedUp():
            return WarmedUp(sum(each.loss for each in cast(Sequence[WarmedUp], answers)))
        case led:
            return led


def join_votes(votes: Sequence[Reduced]) -> Reduced:
    return Reduced(
        version=votes[0].version,
        failure=first_failure(votes),
        compute_seconds=max(vote.compute_seconds for vote in votes),
        # Waiting for others is not part of the exchange, so the replica that entered last measures it.
        exchange_seconds=min(vote.exchange_seconds for vote in votes),
        sums=sum((vote.sums for vote in votes), TokenSums()),
    )


def first_failure(answers: Iterable[Reduced | TrainingMeasured | Entered | Serving | None]) -> str:
    """The first failure among the answers; empty if there is none."""
    return next((answer.failure for answer in answers if answer is not None and answer.failure), "")


def _first_diverged(answers: Iterable[Trained | Published]) -> str:
    """The first report of diverged weights; empty if the parts of all processes are sound."""
    return next((answer.diverged for answer in answers if answer.diverged), "")


def _join_measured(measured: Sequence[TrainingMeasured]) -> TrainingMeasured:
    failure = first_failure(measured)
    if failure:
        return TrainingMeasured([], 0.0, 0.0, failure)
    return TrainingMeasured(
        batches=[
            (sum(tokens for tokens, _ in batch), max(seconds for _, seconds in batch))
            for batch in zip(*(each.batches for each in measured), strict=True)
        ],
        step_seconds=max(each.step_seconds for each in measured),
        exchange_seconds=min(each.exchange_seconds for each in measured),
    )


def _join_digests(digests: Sequence[StateDigest]) -> StateDigest:
    numbers = {digest.number for digest in digests}
    return StateDigest(
        number=numbers.pop() if len(numbers) == 1 else -1,
        parameter_hash=_hash(digest.parameter_hash for digest in digests),
        size=sum(digest.size for digest in digests),  # copies of all parts share one path
        places=[place for digest in digests for place in digest.places],
        ready=all(digest.ready for digest in digests),
        behind=next((digest.behind for digest in digests if digest.behind), ""),
    )


def _hash(hashes: Iterable[int]) -> int:
    """One number for the hashes of all parts; replicas with equal parts get equal numbers."""
    return zlib.crc32(repr(list(hashes)).encode())
