"""Ceiling of throughput: the work of all GPUs if none ever waited, and the share of it that tools leave.

Invariant: the runs are those of `throughput`; the ceiling is made of the planner's prices, and is as true as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment, Found
from benchmarks.evaluation.figures import BarChart, Bars, number_of
from benchmarks.evaluation.runs import QUICK, Runs, Values, key, run_cell, with_searches, words_of
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.table import Column, Table, Value
from benchmarks.evaluation.throughput import MODELS, SEEDS, WORKLOADS
from benchmarks.evaluation.whole_runs import ceiling, tool_bound

COMPARED = ("colocated", "even", "ours")
_BOUNDS = {"ceiling": ceiling, "tools alone": tool_bound}
_COLUMNS = (
    Column("if nobody waits, tokens/s", ",.0f", "tokens/s"),
    *(Column(f"{system}, of it", ".0f", "%") for system in COMPARED),
    Column("it over colocated", ".2f", "x"),
    Column("if tools alone took time, tokens/s", ",.0f", "tokens/s"),
    Column("ours, of that", ".1f", "%"),
)


def _cells(quick: bool) -> list[Cell]:
    settings = [Setting(MODELS[0], workload, seed=seed) for workload in WORKLOADS for seed in SEEDS]
    if quick:
        settings = [Setting(MODELS[0], WORKLOADS[0], **QUICK)]
    found = [
        Cell(f"{words_of(it)}, {what}, seed {it.seed}", function, {"setting": it.arguments()}, it.files)
        for it in settings
        for what, function in _BOUNDS.items()
    ]
    return found + with_searches(run_cell(setting, system) for setting in settings for system in COMPARED)


def _found(results: Sequence[Result]) -> Found:
    runs, body = Runs(results), dict[str, Sequence[Value]]()
    shares: dict[str, list[float]] = {system: [] for system in COMPARED}
    for setting in runs.settings:
        whole, tools = (_by_seed(results, what, setting) for what in ("ceiling", "tools alone"))
        for system, its in shares.items():
            its.append(_share(runs.of(setting, system), whole))
        now = [its[-1] for its in shares.values()]
        alone = _share(runs.of(setting, "ours"), tools)
        body[words_of(setting)] = (fmean(whole.values()), *now, 100 / now[0], fmean(tools.values()), alone)
    figure = BarChart(
        "What of the ceiling is reached: 48 A800",
        "Throughput of systems as percent of what every GPU could do if none ever waited, by workload.",
        list(body),
        [Bars(system, its, like=number_of(system)) for system, its in shares.items()],
        "percent of the ceiling",
    )
    return Found({"shares": Table("workload", _COLUMNS, body)}, {"shares": figure})


def _by_seed(results: Sequence[Result], what: str, setting: Setting) -> dict[int, float]:
    """Tokens/s of a bound."""
    function = _BOUNDS[what]
    asked = [(Setting(**it.cell.arguments["setting"]), it) for it in results if it.cell.function is function]
    return {where.seed: float(it.values["throughput"]) for where, it in asked if key(where, "")[0] == setting}


def _share(values: Mapping[int, Values], bounds: Mapping[int, float]) -> float:
    """Percent of a bound that runs reach, each that of its own seed: the mean."""
    return 100 * fmean(float(values[seed]["throughput"]) / bound for seed, bound in bounds.items())


EXPERIMENT = Experiment(
    "ceiling",
    "How much there is to gain",
    "On 48 A800: how many tokens per second are there, by our prices, if no GPU ever waits?",
    _cells,
    _found,
)
