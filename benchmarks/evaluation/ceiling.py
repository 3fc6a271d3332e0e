"""How much there is to gain at all: what every GPU could do if none ever waited.

Invariant: the runs are those of `throughput`; the ceiling is made of the planner's prices, and is as true as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evaluation.ceiling_cell import ceiling
from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.runs import QUICK, Runs, key, run_cell, with_searches, words_of
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.throughput import MODELS, SEEDS, WORKLOADS
from benchmarks.rows import Row

COMPARED = ("colocated", "even", "ours")


def _settings(quick: bool) -> list[Setting]:
    if quick:
        return [Setting(MODELS[0], WORKLOADS[0], **QUICK)]
    return [Setting(MODELS[0], workload, seed=seed) for workload in WORKLOADS for seed in SEEDS]


def _cells(quick: bool) -> list[Cell]:
    settings = _settings(quick)
    found = [
        Cell(f"{words_of(it)}, ceiling, seed {it.seed}", ceiling, {"setting": it.arguments()}, it.files)
        for it in settings
    ]
    return found + with_searches(run_cell(setting, system) for setting in settings for system in COMPARED)


def _ceilings(results: Sequence[Result]) -> dict[Setting, float]:
    """By setting, seeds told apart."""
    return {
        Setting(**it.cell.arguments["setting"]): float(it.values["throughput"])
        for it in results
        if it.cell.function is ceiling
    }


def _shares(results: Sequence[Result]) -> dict[str, tuple[float, dict[str, float]]]:
    """By workload the mean ceiling, and each system's mean share of it."""
    ceilings = _ceilings(results)
    runs = Runs([it for it in results if it.cell.function is not ceiling])
    found = {}
    for setting in runs.settings:
        tops = {it.seed: top for it, top in ceilings.items() if key(it, "")[0] == setting}
        shares = {}
        for system in COMPARED:
            values = runs.of(setting, system)
            shares[system] = sum(values[seed]["throughput"] / top for seed, top in tops.items()) / len(tops)
        found[words_of(setting)] = sum(tops.values()) / len(tops), shares
    return found


def _rows(results: Sequence[Result]) -> list[Row]:
    rows = []
    for case, (top, shares) in _shares(results).items():
        rows.append(Row(case, "if nobody waits", top, "tokens/s"))
        rows += [Row(case, f"{system}: share of it", 100 * share, "%") for system, share in shares.items()]
        rows.append(Row(case, "it over colocated", 1 / shares["colocated"], "x"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    header = ["workload", "if nobody waits, tokens/s", *(f"{system}, of it" for system in COMPARED)]
    header.append("it over colocated")
    body = []
    for case, (top, shares) in _shares(results).items():
        row = [case, f"{top:,.0f}", *(f"{100 * share:.0f} %" for share in shares.values())]
        body.append([*row, f"{1 / shares['colocated']:.2f}"])
    return {"shares": markdown_table(header, body)}


def _figures(results: Sequence[Result]) -> dict[str, str]:
    found = _shares(results)
    return {
        "shares": grouped_bars(
            "What of the ceiling is reached: 48 A800",
            "Throughput of systems as percent of what every GPU could do if none ever waited, by workload.",
            list(found),
            [
                Bars(system, tuple(100 * shares[system] for _, shares in found.values()), like=number)
                for number, system in enumerate(COMPARED)
            ],
            "percent of the ceiling",
        )
    }


EXPERIMENT = Experiment(
    name="ceiling",
    title="How much there is to gain",
    question="On 48 A800: how many tokens per second are there, if no GPU ever waits?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
