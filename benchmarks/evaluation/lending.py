"""Gain of a run from engines on devices that serve, and the cost to the users of those devices.

Invariant: published numbers are those of ROSE (arXiv 2605.06534), and only stand beside ours. A miss is attributable
where the same request meets its SLO when its engine serves alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.experiment import Experiment, Found
from benchmarks.evaluation.figures import BarChart, Bars
from benchmarks.evaluation.lending_runs import (
    RULES,
    SERVED,
    SYSTEMS,
    WHOLE,
    LendingSetting,
    certified_cell,
    run,
    trace,
)
from benchmarks.evaluation.table import Column, Table, Value
from benchmarks.rows import Row
from benchmarks.workloads.definition import FILES

# With 32 groups a step, as elsewhere, the longest trajectory is most of a step; with 128 work is. DAPO has 512 (arXiv
# 2503.14476), and ROSE an 8B beside a 7B.
LONG, WORK = LendingSetting("search_r1", 6, 8, 32, 32), LendingSetting("search_r1", 6, 8, 128, 16)
BATCH = LendingSetting("search_r1", 6, 8, 512, 6, model="Qwen/Qwen3-8B")
_QUICK = (  # as WORK and BATCH, per GPU
    LendingSetting("search_r1", 2, 3, 43, 8),
    LendingSetting("search_r1", 2, 3, 171, 6, model="Qwen/Qwen3-8B"),
)
BOUNDS = ("fixed", "gate", "elastic", "whole")
WAITING = ("fixed", "gate", "published", "elastic")  # whose rollout is timed, in steps that wait for it
OVER_FIXED, OVER_ELASTIC, OVER_PUBLISHED = 1.3, 1.2, 1.0
PUBLISHED = {"fixed": "1.2 to 3.3", "elastic": "1.2 to 1.5"}
_SECONDS, _OVER = Column("seconds", ",.0f", "s"), Column("over it", ".2f", "x")
_TRAIN, _BORROWED, _MISSES = Column("GPUs that train"), Column("borrowed"), Column("misses")
_COLUMNS = (
    _SECONDS,
    _OVER,
    Column("published"),
    _TRAIN,
    _BORROWED,
    Column("lent", ".0f", "%"),
    Column("away", ".1f", "%"),
    _MISSES,
)
_WAITING_COLUMNS = (
    _SECONDS,
    _OVER,
    Column("rollout of a step", ",.0f", "s"),
    replace(_OVER, name="rollout over it"),
    _TRAIN,
    _BORROWED,
    _MISSES,
)

Systems = Mapping[str, Mapping[str, Any]]  # values of the runs, by system


def synchronous(setting: LendingSetting) -> LendingSetting:
    """The same setting, where a step begins when the one before has been trained on."""
    return replace(setting, steps=setting.steps // 2, staleness=0)


def _cells(quick: bool) -> list[Cell]:
    work, batch = _QUICK if quick else (WORK, BATCH)
    cases = {work: SYSTEMS, synchronous(batch): WAITING}
    if not quick:
        cases |= {LONG: BOUNDS, batch: BOUNDS}
    cells = [certified_cell(name) for name in RULES if name != "published"]
    return cells + [_cell(setting, system) for setting, systems in cases.items() for system in systems]


def _cell(setting: LendingSetting, system: str) -> Cell:
    found, shapes = trace(), [shape_file(model) for model in (setting.model, SERVED, WHOLE)]
    inputs = (*shapes, FILES / f"{setting.workload}.json", *(() if found is None else (found,)))
    cost = float(setting.steps * setting.groups * (setting.lending if system in RULES else 1))
    arguments = {"setting": setting.arguments(), "system": system}
    return Cell(f"{size_of(setting)}, {system}", run, arguments, inputs, cost)


def size_of(setting: LendingSetting) -> str:
    """Name of the size of a setting, independent of the size of the clusters."""
    waits = "" if setting.staleness else ", synchronous"
    return f"{setting.trajectories_a_gpu} trajectories a step and GPU{waits}"


def words_of(setting: LendingSetting) -> str:
    return f"{8 * setting.nodes} own, {8 * setting.lending} lending, {size_of(setting)}"


def _found(results: Sequence[Result]) -> Found:
    found: dict[LendingSetting, dict[str, Mapping[str, Any]]] = {}
    for result in results:
        if result.cell.function is run:
            setting = LendingSetting(**result.cell.arguments["setting"])
            found.setdefault(setting, {})[str(result.cell.arguments["system"])] = result.values
    tables = {
        f"{setting.trajectories_a_gpu}-a-gpu{'' if setting.staleness else '-synchronous'}": _table(setting, systems)
        for setting, systems in found.items()
    }
    goals = [row for setting, systems in found.items() for row in _goals(setting, systems)]
    return Found(tables, {"systems": _figure(found)}, goals)


def _goals(setting: LendingSetting, systems: Systems) -> Iterator[Row]:
    case, gate = words_of(setting), systems["gate"]
    if setting.staleness:
        over = systems["fixed"]["seconds"] / gate["seconds"]
        yield Row(case, "gate over fixed", over, "x", f">= {OVER_FIXED}", over >= OVER_FIXED)
        covered, metric = gate["covered"], "gate: attributable misses inside its envelope"
        yield Row(case, metric, covered, f"of {gate['requests']:,}", "0", covered == 0)
        return
    for name, goal in (("elastic", OVER_ELASTIC), ("published", OVER_PUBLISHED)):
        over = systems[name]["waited"] / gate["waited"]
        yield Row(case, f"rollout time of {name} over the gate's", over, "x", f">= {goal}", over >= goal)


def _table(setting: LendingSetting, systems: Systems) -> Table:
    body: dict[str, Sequence[Value]] = {}
    for name, values in systems.items():
        seconds, over, last = values["seconds"], _over(systems, name, "seconds"), _last(values)
        if setting.staleness:
            shares = [100 * values[what] if values["lent"] else None for what in ("lent", "away")]
            body[name] = (seconds, over, PUBLISHED.get(name, ""), *last[:2], *shares, last[2])
        else:
            body[name] = (seconds, over, values["waited"], _over(systems, name, "waited"), *last)
    return Table("system", _COLUMNS if setting.staleness else _WAITING_COLUMNS, body, case=words_of(setting))


def _over(systems: Systems, name: str, what: str) -> Value:
    return None if name == "gate" else systems[name][what] / systems["gate"][what]


def _last(values: Mapping[str, Any]) -> tuple[Value, Value, Value]:
    """GPUs that train, engines that are borrowed, and misses that lending is to blame for."""
    missed = f"{values['attributable']:,} of {values['requests']:,}" if values["requests"] else ""
    return values["training"], values["borrowed"], missed


def _figure(found: Mapping[LendingSetting, Systems]) -> BarChart:
    overlapping = {setting: systems for setting, systems in found.items() if setting.staleness}
    first = next(iter(overlapping))
    return BarChart(
        f"{8 * first.nodes} H800 of its own, {8 * first.lending} that serve",
        "Generated tokens that were trained on, per second of the run.",
        [size_of(setting) for setting in overlapping],
        [Bars(name, [systems[name]["throughput"] for systems in overlapping.values()]) for name in BOUNDS],
        "tokens per second",
    )


EXPERIMENT = Experiment(
    "lending",
    "Rollouts on devices that serve",
    "What does a run gain by borrowing from GPUs that serve Azure's conversation hour, and who misses an SLO?",
    _cells,
    _found,
)
