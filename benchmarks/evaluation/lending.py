"""Gain of a run from engines on devices that serve, and the cost to the users of those devices.

Invariant: published numbers are those of ROSE (arXiv 2605.06534), and only stand beside ours. A miss is attributable
where the same request meets its SLO when its engine serves alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.lending_cell import (
    RULES,
    SERVED,
    SYSTEMS,
    WHOLE,
    LendingSetting,
    certified_cell,
    run,
    trace,
)
from benchmarks.evaluation.page import markdown_table
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

Values = Mapping[str, Any]


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


def found_of(results: Sequence[Result]) -> dict[LendingSetting, dict[str, Values]]:
    found: dict[LendingSetting, dict[str, Values]] = {}
    for result in results:
        if result.cell.function is run:
            setting = LendingSetting(**result.cell.arguments["setting"])
            found.setdefault(setting, {})[str(result.cell.arguments["system"])] = result.values
    return found


def _rows(results: Sequence[Result]) -> list[Row]:
    rows: list[Row] = []
    for setting, systems in found_of(results).items():
        case = words_of(setting)
        if not setting.staleness:
            rows += _rollout_rows(case, systems)
            continue
        for name, values in systems.items():
            rows.append(Row(case, name, values["seconds"], "s"))
            if values["lent"]:
                rows.append(Row(case, f"{name}: lent", values["lent"], "of the time"))
            if values["requests"]:
                unit = f"of {values['requests']:,}"
                rows.append(Row(case, f"{name}: attributable misses", values["attributable"], unit))
                if name == "gate":
                    covered = values["covered"]
                    metric = f"{name}: attributable misses inside its envelope"
                    rows.append(Row(case, metric, covered, unit, "0", covered == 0))
        fixed, gate, bound = (systems[name]["seconds"] for name in ("fixed", "gate", "whole"))
        rows.append(Row(case, "gate over fixed", fixed / gate, "x", f">= {OVER_FIXED}", fixed / gate >= OVER_FIXED))
        rows.append(Row(case, "whole devices over fixed: the bound", fixed / bound, "x"))
    return rows


def _rollout_rows(case: str, systems: Mapping[str, Values]) -> list[Row]:
    rows = []
    for name, values in systems.items():
        rows.append(Row(case, f"{name}: rollout", values["waited"], "s a step"))
        rows.append(Row(case, f"{name}: GPUs that train", values["training"], ""))
        rows.append(Row(case, f"{name} over the gate", values["seconds"] / systems["gate"]["seconds"], "x"))
    for name, goal in (("elastic", OVER_ELASTIC), ("published", OVER_PUBLISHED)):
        over = systems[name]["waited"] / systems["gate"]["waited"]
        rows.append(Row(case, f"rollout time of {name} over the gate's", over, "x", f">= {goal}", over >= goal))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    return {
        f"{setting.trajectories_a_gpu}-a-gpu{'' if setting.staleness else '-synchronous'}": _table(systems)
        if setting.staleness
        else _waiting_table(systems)
        for setting, systems in found_of(results).items()
    }


def _table(systems: Mapping[str, Values]) -> str:
    header = ["system", "seconds", "over it", "published", "GPUs that train", "borrowed", "lent", "away", "misses"]
    body = []
    for name, values in systems.items():
        body.append(
            [
                name,
                f"{values['seconds']:,.0f}",
                _over(systems, name, "seconds"),
                PUBLISHED.get(name, ""),
                f"{values['training']}",
                f"{values['borrowed']}",
                f"{100 * values['lent']:.0f} %" if values["lent"] else "",
                f"{100 * values['away']:.1f} %" if values["lent"] else "",
                _missed(values),
            ]
        )
    return markdown_table(header, body)


def _waiting_table(systems: Mapping[str, Values]) -> str:
    header = ["system", "seconds", "over it", "rollout of a step", "over it", "GPUs that train", "borrowed", "misses"]
    body = []
    for name, values in systems.items():
        body.append(
            [
                name,
                f"{values['seconds']:,.0f}",
                _over(systems, name, "seconds"),
                f"{values['waited']:,.0f}",
                _over(systems, name, "waited"),
                f"{values['training']}",
                f"{values['borrowed']}",
                _missed(values),
            ]
        )
    return markdown_table(header, body)


def _over(systems: Mapping[str, Values], name: str, what: str) -> str:
    return "" if name == "gate" else f"{systems[name][what] / systems['gate'][what]:.2f}"


def _missed(values: Values) -> str:
    return f"{values['attributable']:,} of {values['requests']:,}" if values["requests"] else ""


def _figures(results: Sequence[Result]) -> dict[str, str]:
    found = {setting: systems for setting, systems in found_of(results).items() if setting.staleness}
    bars = [Bars(name, tuple(systems[name]["throughput"] for systems in found.values())) for name in BOUNDS]
    groups = [size_of(setting) for setting in found]
    (first, *_) = found
    return {
        "systems": grouped_bars(
            f"{8 * first.nodes} H800 of its own, {8 * first.lending} that serve",
            "Generated tokens that were trained on, per second of the run.",
            groups,
            bars,
            "tokens per second",
        )
    }


EXPERIMENT = Experiment(
    name="lending",
    title="Rollouts on devices that serve",
    question="What does a run gain by borrowing from GPUs that serve Azure's conversation hour, and who misses an SLO?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
