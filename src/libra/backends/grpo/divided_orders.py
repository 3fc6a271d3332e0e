"""One order for a replica of several processes: what each of them has to do, and one answer of their answers.

Invariant: every sample goes to exactly one process. The joined answer says yes only if all of them do, and names
a state only if all hold it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import cast

from msgspec.structs import replace

from libra.backends.grpo.joint_step import split_by, split_evenly
from libra.backends.transport.channel import FromWorker, ToWorker
from libra.backends.transport.trainer_messages import (
    Entered,
    Follow,
    MeasureTraining,
    Reduced,
    Serving,
    StateDigest,
    Train,
    Trained,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)


def divide(order: ToWorker, parts: int) -> list[ToWorker]:
    """The orders of the processes, that of the leader first. Raises `ValueError` where there is none for each."""
    match order:
        case Train():
            # The loss denominator is no sum over processes: each adds it up with its own kind in the other replicas.
            return [replace(order, samples=share) for share in split_evenly(order.samples, parts)]
        case WarmUp():
            return [replace(order, batch=order.batch[part::parts]) for part in range(parts)]
        case MeasureTraining():
            # As samples are divided: what is timed is to be what a step takes.
            divided = [split_by(lengths, parts, int) for lengths in order.batches]
            return [replace(order, batches=[shares[part] for shares in divided]) for part in range(parts)]
        case Follow():
            if len(order.places) != parts:
                raise ValueError(
                    f"a replica of {parts} processes cannot follow one of {len(order.places)}: all replicas must have"
                    " the same number"
                )
            return [Follow([place]) for place in order.places]
        case _:
            return [order] * parts


def join(answers: Sequence[FromWorker]) -> FromWorker:
    """One answer for all processes; where they would all say the same, that of the leader, who comes first."""
    kinds = {type(answer) for answer in answers}
    if len(kinds) > 1:
        raise TypeError(f"the processes of a replica answer {', '.join(sorted(kind.__name__ for kind in kinds))}")
    match answers[0]:
        case Reduced():
            return _vote(cast(Sequence[Reduced], answers))
        case Trained() as led:
            return replace(led, parameter_hash=_hash(each.parameter_hash for each in cast(Sequence[Trained], answers)))
        case TrainingMeasured():
            return _measured(cast(Sequence[TrainingMeasured], answers))
        case Entered() as led:
            return replace(led, failure=_first(each.failure for each in cast(Sequence[Entered], answers)))
        case Serving():
            servings = cast(Sequence[Serving], answers)
            ports = [port for serving in servings for port in serving.ports]
            return Serving(ports, _first(serving.failure for serving in servings))
        case StateDigest():
            return _digest(cast(Sequence[StateDigest], answers))
        case WarmedUp():
            losses = cast(Sequence[WarmedUp], answers)
            return WarmedUp(sum(each.loss for each in losses), sum(each.tokens for each in losses))
        case led:
            return led


def _vote(votes: Sequence[Reduced]) -> Reduced:
    return Reduced(
        version=votes[0].version,
        failure=_first(vote.failure for vote in votes),
        compute_seconds=max(vote.compute_seconds for vote in votes),
        # Waiting for others in the exchange is not part of it: it takes as long as for the last replica to come.
        exchange_seconds=min(vote.exchange_seconds for vote in votes),
        forward_tokens=sum(vote.forward_tokens for vote in votes),
        generated_tokens=sum(vote.generated_tokens for vote in votes),
        clipped=sum(vote.clipped for vote in votes),
        behaviour_weight=sum(vote.behaviour_weight for vote in votes),
        prox_gap=sum(vote.prox_gap for vote in votes),
    )


def _measured(measured: Sequence[TrainingMeasured]) -> TrainingMeasured:
    failure = _first(each.failure for each in measured)
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


def _digest(digests: Sequence[StateDigest]) -> StateDigest:
    numbers = {digest.number for digest in digests}
    return StateDigest(
        number=numbers.pop() if len(numbers) == 1 else -1,
        parameter_hash=_hash(digest.parameter_hash for digest in digests),
        size=sum(digest.size for digest in digests),  # copies of all parts share a way
        places=[place for digest in digests for place in digest.places],
        ready=all(digest.ready for digest in digests),
        behind=_first(digest.behind for digest in digests),
    )


def _hash(hashes: Iterable[int]) -> int:
    """One number for the hashes of all parts: equal on replicas whose parts all are."""
    return zlib.crc32(repr(list(hashes)).encode())


def _first(failures: Iterable[str]) -> str:
    """Empty where nobody failed."""
    return next((failure for failure in failures if failure), "")
