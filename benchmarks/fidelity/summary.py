"""Outcomes of requests, and the few numbers that a run is judged by.

Invariant: measured and predicted runs are reduced by the same code from the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from libra.sim.clock import seconds
from libra.sim.engine.request import Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request. Times are ticks, lengths are tokens."""

    number: int
    engine: int
    arrival: int
    first_token: int
    finish: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int


def outcomes(requests: Iterable[Request]) -> tuple[Outcome, ...]:
    """Outcomes by request number. Raises ValueError for a request that was not served in full."""
    done = []
    for request in sorted(requests, key=lambda request: request.number):
        if request.engine is None or request.first_token is None or request.finish is None:
            raise ValueError(f"request {request.number} is {request.status}; run it to its end")
        if request.generated != request.output_tokens:
            raise ValueError(
                f"request {request.number} generated {request.generated} of {request.output_tokens} tokens"
            )
        done.append(
            Outcome(
                request.number,
                request.engine,
                request.arrival,
                request.first_token,
                request.finish,
                request.prompt_tokens,
                request.output_tokens,
                request.cached_tokens,
                request.preemptions,
            )
        )
    return tuple(done)


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds, but for `throughput` in generated tokens per second, and counts."""

    throughput: float
    makespan: float  # from the first arrival to the last finish
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float  # between tokens of a request, after its first
    tpot_p99: float
    latency_mean: float  # from arrival to finish
    latency_p99: float
    preemptions: float
    cached_tokens: float


def summarize(served: Sequence[Outcome]) -> Summary:
    """Raises ValueError where there is none."""
    if not served:
        raise ValueError("there are no outcomes to summarize; run a workload that has requests")
    makespan = seconds(max(one.finish for one in served) - min(one.arrival for one in served))
    first = [seconds(one.first_token - one.arrival) for one in served]
    latency = [seconds(one.finish - one.arrival) for one in served]
    between = [
        seconds(one.finish - one.first_token) / (one.output_tokens - 1) for one in served if one.output_tokens > 1
    ] or [0.0]
    return Summary(
        throughput=sum(one.output_tokens for one in served) / makespan,
        makespan=makespan,
        ttft_mean=fmean(first),
        ttft_p99=_percentile(first, 0.99),
        tpot_mean=fmean(between),
        tpot_p99=_percentile(between, 0.99),
        latency_mean=fmean(latency),
        latency_p99=_percentile(latency, 0.99),
        preemptions=float(sum(one.preemptions for one in served)),
        cached_tokens=float(sum(one.cached_tokens for one in served)),
    )


def mean(repeats: Sequence[Summary]) -> Summary:
    """Mean of the repeats by field. Raises ValueError where there are none."""
    if not repeats:
        raise ValueError("there are no repeats to take the mean of; run the workload once or more")
    return Summary(**{field.name: fmean(getattr(one, field.name) for one in repeats) for field in fields(Summary)})


def errors(predicted: Summary, measured: Summary) -> Summary:
    """Relative and signed, by field: above 0 is predicted too large."""
    return Summary(
        **{
            field.name: relative_error(getattr(predicted, field.name), getattr(measured, field.name))
            for field in fields(Summary)
        }
    )


def repeat_error(repeats: Sequence[Summary]) -> Summary:
    """Error of an engine as a prediction of itself, by field: the mean, over the repeats, of the absolute error of that
    repeat as a prediction of the mean of all others."""
    if len(repeats) < 2:
        raise ValueError(f"there is {len(repeats)} repeat; an engine is compared with itself over two or more")
    found = [errors(one, mean([*repeats[:index], *repeats[index + 1 :]])) for index, one in enumerate(repeats)]
    return Summary(**{field.name: fmean(abs(getattr(one, field.name)) for one in found) for field in fields(Summary)})


def relative_error(predicted: float, measured: float) -> float:
    """Signed. Of what was measured as 0, it is 0 if that was predicted, and infinite otherwise."""
    if measured == 0:
        return 0.0 if predicted == 0 else math.inf
    return predicted / measured - 1


def _percentile(values: list[float], share: float) -> float:
    """The least value that `share` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
