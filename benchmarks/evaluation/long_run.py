"""The headline: 200 steps, in which the drift is slow, as in a real run.

Invariant: systems are those of `throughput`, with the choices that were searched for there.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Line, lines
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.palette import number_of
from benchmarks.evaluation.posttraining_cell import run
from benchmarks.evaluation.runs import QUICK, Runs, key, model_name, run_cell, with_searches, words_of
from benchmarks.evaluation.scale import measured_axis
from benchmarks.evaluation.setting import Setting
from benchmarks.rows import Row

MODEL, WORKLOAD = "Qwen/Qwen3-14B", "search_r1"
SYSTEMS = ("colocated", "even", "static", "ours")
STEPS, _QUICK_STEPS = 200, 20
CPU_GOAL = 40.0  # seconds
_HOUR = 3600.0


def _cells(quick: bool) -> list[Cell]:
    setting = Setting(MODEL, WORKLOAD, **({**QUICK, "steps": _QUICK_STEPS} if quick else {"steps": STEPS}))
    return with_searches(run_cell(setting, system) for system in SYSTEMS)


def _cpu_seconds(results: Sequence[Result]) -> dict[str, float]:
    return {str(it.cell.arguments["system"]): it.cpu_seconds for it in results if it.cell.function is run}


def _rows(results: Sequence[Result]) -> list[Row]:
    runs = Runs(results)
    (setting,) = runs.settings
    case, rows = words_of(setting), []
    for system, seconds in _cpu_seconds(results).items():
        rows.append(Row(case, system, runs.mean(setting, system, "throughput").value, "tokens/s"))
        rows.append(Row(case, f"simulating {system}", seconds, "s CPU", f"below {CPU_GOAL:g}", seconds < CPU_GOAL))
        if system != "ours":
            gain = runs.ratio(key(setting, "ours"), key(setting, system), "throughput").value
            rows.append(Row(case, f"ours over {system}", gain, "x"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    (setting,) = runs.settings
    body = []
    for system, seconds in _cpu_seconds(results).items():
        (values,) = runs.of(setting, system).values()
        gain = runs.ratio(key(setting, "ours"), key(setting, system), "throughput").value
        over = "" if system == "ours" else f"{gain:.2f}"
        row = [system, f"{values['throughput']:,.0f}", f"{values['seconds'] / _HOUR:.1f}", over, f"{values['changes']}"]
        body.append([*row, f"{seconds:.0f}"])
    return {
        "systems": markdown_table(["system", "tokens/s", "hours", "ours over it", "changes of plan", "CPU s"], body)
    }


def _figures(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    (setting,) = runs.settings
    series = []
    for system in SYSTEMS:
        (values,) = runs.of(setting, system).values()
        points = tuple((end / _HOUR, step + 1.0) for step, end in enumerate(values["ended"]))
        series.append(Line(system, points, like=number_of(system)))
    return {
        "steps": lines(
            f"Steps of a long run: {setting.gpus} A800, {model_name(setting)}, {setting.workload}",
            "Optimiser steps that are done by hours since the start, of each system.",
            series,
            measured_axis("hours", [x for line in series for x, _ in line.points]),
            measured_axis("steps", [y for line in series for _, y in line.points]),
        )
    }


EXPERIMENT = Experiment(
    name="long-run",
    title="A long run",
    question="Over 200 steps on 48 A800: how long does each system take, and how long its simulation?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
