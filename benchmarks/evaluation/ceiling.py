"""Ceiling of throughput: the work of all GPUs if none ever waited, and the share of it that tools leave.

Invariant: the runs are those of `throughput`; the ceiling is made of the planner's prices, and is as true as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evaluation.ceiling_cell import ceiling
from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.palette import number_of
from benchmarks.evaluation.runs import QUICK, Runs, key, run_cell, with_searches, words_of
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.throughput import MODELS, SEEDS, WORKLOADS
from benchmarks.evaluation.tool_bound_cell import tool_bound
from benchmarks.rows import Row

COMPARED = ("colocated", "even", "ours")


def _settings(quick: bool) -> list[Setting]:
    if quick:
        return [Setting(MODELS[0], WORKLOADS[0], **QUICK)]
    return [Setting(MODELS[0], workload, seed=seed) for workload in WORKLOADS for seed in SEEDS]


def _cells(quick: bool) -> list[Cell]:
    settings = _settings(quick)
    found = [
        Cell(f"{words_of(it)}, {what}, seed {it.seed}", function, {"setting": it.arguments()}, it.files)
        for it in settings
        for what, function in (("ceiling", ceiling), ("tools alone", tool_bound))
    ]
    return found + with_searches(run_cell(setting, system) for setting in settings for system in COMPARED)


@dataclass(frozen=True, slots=True)
class _Room:
    """Bounds and shares of one workload, means over the seeds."""

    ceiling: float  # tokens/s
    tools_alone: float  # tokens/s
    of_ceiling: dict[str, float]  # share of it, by system
    of_tools_alone: float  # share of it that ours reaches


def _rooms(results: Sequence[Result]) -> dict[str, _Room]:
    """Bounds and shares by workload."""
    bounds = (ceiling, tool_bound)
    runs = Runs([it for it in results if it.cell.function not in bounds])
    found = {}
    for setting in runs.settings:
        tops, tools = (_by_seed(results, function, setting) for function in bounds)
        shares = {system: _mean_share(runs.of(setting, system), tops) for system in COMPARED}
        found[words_of(setting)] = _Room(
            sum(tops.values()) / len(tops),
            sum(tools.values()) / len(tools),
            shares,
            _mean_share(runs.of(setting, "ours"), tools),
        )
    return found


def _by_seed(results: Sequence[Result], function: Any, setting: Setting) -> dict[int, float]:
    asked = [(Setting(**it.cell.arguments["setting"]), it) for it in results if it.cell.function is function]
    return {where.seed: float(it.values["throughput"]) for where, it in asked if key(where, "")[0] == setting}


def _mean_share(values: Any, bounds: dict[int, float]) -> float:
    return sum(float(values[seed]["throughput"]) / bound for seed, bound in bounds.items()) / len(bounds)


def _rows(results: Sequence[Result]) -> list[Row]:
    rows = []
    for case, room in _rooms(results).items():
        rows.append(Row(case, "if nobody waits", room.ceiling, "tokens/s"))
        rows += [Row(case, f"{system}: share of it", 100 * share, "%") for system, share in room.of_ceiling.items()]
        rows.append(Row(case, "it over colocated", 1 / room.of_ceiling["colocated"], "x"))
        rows.append(Row(case, "if tools alone took time", room.tools_alone, "tokens/s"))
        rows.append(Row(case, "ours: share of that", 100 * room.of_tools_alone, "%"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    header = ["workload", "if nobody waits, tokens/s", *(f"{system}, of it" for system in COMPARED)]
    header += ["it over colocated", "if tools alone took time, tokens/s", "ours, of that"]
    body = []
    for case, room in _rooms(results).items():
        row = [case, f"{room.ceiling:,.0f}", *(f"{100 * share:.0f} %" for share in room.of_ceiling.values())]
        row += [f"{1 / room.of_ceiling['colocated']:.2f}", f"{room.tools_alone:,.0f}"]
        body.append([*row, f"{100 * room.of_tools_alone:.1f} %"])
    return {"shares": markdown_table(header, body)}


def _figures(results: Sequence[Result]) -> dict[str, str]:
    found = _rooms(results)
    return {
        "shares": grouped_bars(
            "What of the ceiling is reached: 48 A800",
            "Throughput of systems as percent of what every GPU could do if none ever waited, by workload.",
            list(found),
            [
                Bars(system, tuple(100 * room.of_ceiling[system] for room in found.values()), like=number_of(system))
                for system in COMPARED
            ],
            "percent of the ceiling",
        )
    }


EXPERIMENT = Experiment(
    name="ceiling",
    title="How much there is to gain",
    question="On 48 A800: how many tokens per second are there, by our prices, if no GPU ever waits?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
