"""The numbers of a simulation as versioned JSON text.

Invariant: equal results give equal bytes, and every metric in the text is defined in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from libra.sim.clock import seconds
from libra.sim.engine.config import EngineConfig
from libra.sim.outcome.definitions import COMPLETED, DEFINITIONS
from libra.sim.outcome.metrics import endings, engine_metrics, metrics_of
from libra.sim.outcome.result import SimulationResult

FORMAT = 1


def dump_result(result: SimulationResult) -> str:
    """What was asked and what came of it, without the single requests."""
    return _written(document(result), "") + "\n"


def document(result: SimulationResult) -> dict[str, Any]:
    """The same as JSON values. Engines tell their configuration by its place in `configs`: most have the same."""
    configs: dict[EngineConfig, int] = {}
    places = [configs.setdefault(engine.config, len(configs)) for engine in result.engines]
    return {
        "format": FORMAT,
        "partial": result.partial,
        "end": seconds(result.end),
        "workload": dict(result.workload),
        "metrics": asdict(metrics_of(result)),
        "endings": [asdict(ending) for ending in endings(result.requests)],
        "configs": [asdict(config) for config in configs],
        "engines": [
            {**asdict(metrics), "config": place} for metrics, place in zip(engine_metrics(result), places, strict=True)
        ],
        "definitions": {
            "all": COMPLETED,
            **{key: {"name": it.name, "unit": it.unit, "text": it.text} for key, it in DEFINITIONS.items()},
        },
    }


def _written(value: Any, indent: str) -> str:
    """One entry a line, but an object or list of nothing but scalars is one line: a line an engine."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if not any(isinstance(part, dict | list | tuple) for part in inside):
        return json.dumps(value, allow_nan=False)
    deeper = indent + "  "
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_written(part, deeper)}" for key, part in value.items()]
        return "{\n" + ",\n".join(deeper + line for line in lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _written(part, deeper) for part in value) + f"\n{indent}]"
