"""The files of a simulation: its numbers as versioned JSON, and the outcome of each request as a line of JSON.

Invariant: the document defines each of its metrics. Every submitted request has a line, in the order of arrival. Times
are seconds, and the value of an event that never happened is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from libra.sim.clock import TICKS, seconds
from libra.sim.engine.config import EngineConfig
from libra.sim.outcome.definitions import COMPLETED, DEFINITIONS
from libra.sim.outcome.metrics import bounded_shares, endings, engine_metrics, metrics_of
from libra.sim.outcome.result import ENDS, RequestColumns, SimulationResult
from libra.sim.outcome.transfer_metrics import transfer_metrics

FORMAT = 1


def document(result: SimulationResult) -> dict[str, Any]:
    """The workload and the result as JSON values, without the single requests. An engine's `config` is an index into
    `configs`, since most engines have the same configuration."""
    configs: dict[EngineConfig, int] = {}
    places = [configs.setdefault(engine.config, len(configs)) for engine in result.engines]
    transfers = transfer_metrics(result)
    engines = [asdict(metrics) for metrics in engine_metrics(result)]
    for engine in engines if transfers is None else ():
        del engine["role"]  # all engines have the same role
    return {
        "format": FORMAT,
        "partial": result.partial,
        "end": seconds(result.end),
        "workload": dict(result.workload),
        "metrics": asdict(metrics_of(result)),
        "endings": [asdict(ending) for ending in endings(result.requests)],
        "configs": [asdict(config) for config in configs],
        "engines": [{**engine, "config": place} for engine, place in zip(engines, places, strict=True)],
        **({} if transfers is None else {"transfers": asdict(transfers)}),
        **_groups(result),
        **({"kv_tiers": [asdict(tier) for tier in result.tiers]} if result.tiers else {}),
        "definitions": {
            "all": COMPLETED,
            **{key: {"name": it.name, "unit": it.unit, "text": it.text} for key, it in DEFINITIONS.items()},
        },
    }


def _groups(result: SimulationResult) -> dict[str, Any]:
    """Groups of ranks, with the share of their iterations' time by bottleneck."""
    told = [
        {"name": group.name, "ranks": group.ranks, "bounded_share": bounded_shares(group)} for group in result.groups
    ]
    return {"groups": told} if told else {}


FIELDS = {
    "number": "the request, unique in a workload",
    "engine": "name of the engine that it was sent to",
    "status": "finished, interrupted, cancelled, refused, failed or unfinished",
    "reason": "reason why it did not finish; null also if the policy stopped it or its caller cancelled it",
    "arrival": "s",
    "scheduled": "s, start of its first iteration",
    "prefill_end": "s, end of the iteration that completed its prompt",
    "first_token": "s",
    "finish": "s, also for cancelled or refused requests",
    "prompt_tokens": "tokens",
    "output_tokens": "tokens to generate: the requested number, or fewer if the model length limits it",
    "generated_tokens": "tokens generated so far",
    "cached_tokens": "of the prompt, found in the prefix cache when it was first admitted",
    "preemptions": "times that it returned to the queue",
    "trajectory": "id of the trajectory that made it",
    "turn": "of the trajectory, from 0",
}

_ROWS = 10_000  # rows in memory at a time


def write_outcomes(result: SimulationResult, path: Path | str) -> None:
    """Write a line for each request, with the fields of `FIELDS`."""
    names = [engine.name for engine in result.engines]
    with open(path, "w", encoding="utf-8") as file:
        for first in range(0, len(result.requests), _ROWS):
            for row in _rows(result.requests, names, slice(first, first + _ROWS)):
                record = dict(zip(FIELDS, row, strict=True))
                file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")


def _rows(requests: RequestColumns, names: list[str], part: slice) -> Iterator[tuple[Any, ...]]:
    times = (requests.arrival, requests.scheduled, requests.prefill_end, requests.first_token, requests.finish)
    lengths = (requests.prompt, requests.output, requests.generated, requests.cached, requests.preemptions)
    return zip(
        requests.number[part].tolist(),
        _named(requests.engine[part].tolist(), names),
        [ENDS[code] for code in requests.status[part].tolist()],
        _named(requests.reason[part].tolist(), requests.reasons),
        *([None if tick < 0 else tick / TICKS for tick in column[part].tolist()] for column in times),
        *(column[part].tolist() for column in lengths),
        _named(requests.trajectory[part].tolist(), requests.trajectories),
        [None if turn < 0 else turn for turn in requests.turn[part].tolist()],
        strict=True,
    )


def _named(indices: list[int], names: list[str] | tuple[str, ...]) -> list[str | None]:
    return [None if index < 0 else names[index] for index in indices]
