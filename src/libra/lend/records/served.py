"""Ended requests of a server: the lines of `served-<number>.jsonl`.

Invariant: there is a line for every ended request, written as it ends. Times are seconds; `number` counts the requests
of the traffic from its start, so runs under the same traffic can be compared request by request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from libra.lend.gate import Slo
from libra.records.schema import Record, ServedSummary, read_records


@dataclass(frozen=True, slots=True)
class ServedRequest(Record):
    """One request that ended."""

    number: int
    arrival: float  # since the traffic began
    prompt_tokens: int
    output_tokens: int
    ttft: float
    tpot: float  # mean over the tokens after the first; 0 for a single token
    came: float | None = None  # the arrival on the machine's monotonic clock; None: in older records

    def misses(self, slo: Slo) -> bool:
        return self.ttft > slo.ttft or self.tpot > slo.tpot


def summarise(served: Sequence[ServedRequest], slo: Slo) -> ServedSummary | None:
    """Summary of the requests; None if no request ended."""
    if not served:
        return None
    ttft, tpot = (float(np.quantile([getattr(it, name) for it in served], 0.99)) for name in ("ttft", "tpot"))
    return ServedSummary(len(served), sum(it.misses(slo) for it in served), ttft, tpot)


def attributable(lent: Sequence[ServedRequest], alone: Sequence[ServedRequest], slo: Slo) -> int:
    """Number of requests to one server that missed their SLO with lending and met it without. `lent` and `alone` are
    the same traffic."""
    met: Mapping[int, bool] = {it.number: not it.misses(slo) for it in alone}
    return sum(it.misses(slo) and met.get(it.number, False) for it in lent)


def read_served(path: Path) -> list[ServedRequest]:
    """Read the requests of a file, none if it does not exist. Raises `RecordFormatError`."""
    return list(read_records(ServedRequest, path)) if path.is_file() else []
