"""An open loop of recorded requests.

Invariant: lengths, prefixes and priorities are the record's; only the time between arrivals is scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from libra.sim.clock import LONGEST, TICKS, ticks
from libra.sim.engine.request import Chain, Request
from libra.sim.workload.protocol import Requests
from libra.sim.workload.request_file import RecordedRequest


def recorded_requests(
    records: Sequence[RecordedRequest],
    *,
    start_seconds: float = 0.0,
    rate_scale: float = 1.0,
    source: Mapping[str, Any] | None = None,
) -> Requests:
    """The requests from `start_seconds` of the record on, `rate_scale` times as fast (2: half the time between them).

    `records` are in the order of arrival. A request is cancelled as long after its arrival as the record says, whatever
    the scale. `source` says where the records are from, as JSON values. Raises ValueError where none are left.
    """
    if not (math.isfinite(rate_scale) and rate_scale > 0):
        raise ValueError(f"rate_scale is {rate_scale}; set it to more than 0, and finite")
    start = ticks(start_seconds)
    kept = [record for record in records if record.arrival >= start]
    if not kept:
        raise ValueError(f"no request arrives at or after start_seconds {start_seconds}: start earlier")
    if (kept[-1].arrival - start) / rate_scale >= LONGEST * TICKS:
        raise ValueError(f"rate_scale is {rate_scale}: the last request would come after more than 106 days; raise it")
    description = {
        "name": "recorded requests",
        "source": dict(source or {}),
        "requests": len(kept),
        "start_seconds": start_seconds,
        "rate_scale": rate_scale,
    }
    return Requests(partial(_requests, kept, start, rate_scale), description)


def _requests(records: list[RecordedRequest], start: int, rate_scale: float) -> Iterator[Request]:
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
        )
