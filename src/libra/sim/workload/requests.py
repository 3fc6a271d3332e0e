"""Workloads: requests in the order of time, and requests that follow the end of another request.

Invariant: a workload is the same at each start, and the number of a request does not depend on the outcome of other
requests. So two simulations of one workload can be compared request by request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from libra.sim.clock import LONGEST, TICKS, ticks
from libra.sim.engine.request import Chain, Request, Stop


class Workload(Protocol):
    """The work of one simulation at a time. The simulation calls `start`, and then `finished` for every ended request,
    in order of time."""

    def start(self) -> Iterable[Request]:
        """The requests known from the beginning, sorted by (arrival, number). They may be a million and are made
        lazily. Resets the state of an earlier start."""
        ...

    def finished(self, request: Request, now: int) -> Request | None:
        """The request that follows `request`, which was finished, cancelled or refused at tick `now`. The following
        request arrives at `now` or later. None: no request follows."""
        ...

    def describe(self) -> dict[str, Any]:
        """Name, distributions, parameters and seed, as JSON values."""
        ...


class Requests:
    """An open loop: requests whose arrivals do not depend on earlier requests.

    `make` returns the requests at each start, sorted by (arrival, number). Iterating raises ValueError if they are not
    sorted.
    """

    def __init__(self, make: Callable[[], Iterable[Request]], description: Mapping[str, Any]) -> None:
        self._make = make
        self._description = dict(description)

    def start(self) -> Iterator[Request]:
        arrival, number = -1, -1
        for request in self._make():
            if request.arrival < arrival or (request.arrival == arrival and request.number <= number):
                raise ValueError(
                    f"request {request.number} arrives at tick {request.arrival}, but comes after request {number} of"
                    f" tick {arrival}: sort the requests by arrival and number, and give each number once"
                )
            arrival, number = request.arrival, request.number
            yield request

    def finished(self, request: Request, now: int) -> None:
        return None

    def describe(self) -> dict[str, Any]:
        return dict(self._description)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request from a file of recorded requests. Times are ticks from time 0 of this file."""

    arrival: int
    prompt_tokens: int
    output_tokens: int
    prefix: str | None = None  # requests with the same prefix have their first `prefix_tokens` tokens in common
    prefix_tokens: int = 0
    priority: int = 0  # lower values are served first
    cancel_at: int | None = None
    stop: Stop = "length"


def recorded_requests(
    records: Sequence[RecordedRequest],
    *,
    start_seconds: float = 0.0,
    rate_scale: float = 1.0,
    source: Mapping[str, Any] | None = None,
) -> Requests:
    """The requests that arrive at `start_seconds` of the file or later, `rate_scale` times as fast (2: half the time
    between arrivals).

    `records` are in the order of arrival. The time from a request's arrival to its cancellation is not scaled. `source`
    describes the source of the records, as JSON values. Raises ValueError if no request is left.
    """
    if not (math.isfinite(rate_scale) and rate_scale > 0):
        raise ValueError(f"rate_scale is {rate_scale}; set it to more than 0, and finite")
    start = ticks(start_seconds)
    kept = [record for record in records if record.arrival >= start]
    if not kept:
        raise ValueError(f"start_seconds is {start_seconds}; no request arrives then or later: start earlier")
    if (kept[-1].arrival - start) / rate_scale >= LONGEST * TICKS:
        raise ValueError(f"rate_scale is {rate_scale}: the last request would arrive after 106 days; raise rate_scale")
    description = {
        "name": "recorded requests",
        "source": dict(source or {}),
        "requests": len(kept),
        "start_seconds": start_seconds,
        "rate_scale": rate_scale,
    }
    return Requests(partial(_requests, kept, start, rate_scale), description)


def repeated(records: Sequence[RecordedRequest], times: int) -> tuple[RecordedRequest, ...]:
    """The record repeated `times` times, at its own rate. Each repetition has prefixes of its own, so that it finds
    none in the caches."""
    span = records[-1].arrival - records[0].arrival
    period = span + span // max(1, len(records) - 1)

    def again(record: RecordedRequest, turn: int) -> RecordedRequest:
        prefix = record.prefix if record.prefix is None or not turn else f"{record.prefix}, turn {turn + 1}"
        cancel_at = None if record.cancel_at is None else record.cancel_at + turn * period
        return replace(record, arrival=record.arrival + turn * period, prefix=prefix, cancel_at=cancel_at)

    return tuple(again(record, turn) for turn in range(times) for record in records)


def around(records: Sequence[RecordedRequest], begins: float) -> Iterator[Request]:
    """The requests of a record, repeated endlessly and without cancellations, from the share `begins` of the record on.
    The gap between the last request and the first is the record's mean gap."""
    first, last = records[0].arrival, records[-1].arrival
    lap = last - first + max(1, (last - first) // max(1, len(records) - 1))
    start = first + int(begins * lap)
    times = ((number * lap, record) for number in count() for record in records)
    coming = (replace(it, arrival=before + it.arrival - start, cancel_at=None) for before, it in times)
    return _requests((it for it in coming if it.arrival >= 0), 0, 1.0)


def _requests(records: Iterable[RecordedRequest], start: int, rate_scale: float) -> Iterator[Request]:
    numerator, denominator = rate_scale.as_integer_ratio()
    prefixes: dict[str, Chain] = {}
    for number, record in enumerate(records):
        arrival = (record.arrival - start) * denominator // numerator
        chain = None
        if record.prefix is not None:
            prefix = prefixes.setdefault(record.prefix, Chain(record.prefix))
            chain = Chain(f"{record.prefix} request {number}", prefix, record.prefix_tokens)
        yield Request(
            number,
            arrival,
            record.prompt_tokens,
            record.output_tokens,
            chain=chain,
            priority=record.priority,
            cancel_at=None if record.cancel_at is None else arrival + record.cancel_at - record.arrival,
            stop=record.stop,
        )
