"""From 16 to 1,024 GPUs: what a GPU is worth, and what it costs to plan and to simulate.

Invariant: the batch grows in proportion to the cluster, so that every GPU has as much to do. CPU seconds depend on the
machine; throughput does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.choices import choice_cell, choose, search, search_cell
from benchmarks.evaluation.experiment import Experiment, Found
from benchmarks.evaluation.figures import Axis, Figure, Line, LineChart, number_of
from benchmarks.evaluation.runs import Values, model_name
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.table import Column, Table
from benchmarks.evaluation.whole_runs import scale
from benchmarks.rows import Row

MODEL, WORKLOAD = "Qwen/Qwen3-14B", "search_r1"
NODES = (2, 4, 8, 16, 32, 64, 128)
_QUICK_NODES = NODES[:2]
SYSTEMS = ("ours", "even")
STEPS = 15  # the first of a run: two decisions are in them
_GROUPS = 32 / 6  # of a step, for each node
_COLUMNS = (
    Column("ours, tokens/s and GPU", ".1f", "tokens/s"),
    Column("even split, tokens/s and GPU", ".1f", "tokens/s"),
    Column("ours over it", ".2f", "x"),
    Column("one plan, CPU s", ".1f", "s"),
    Column("search of the even split's choice, CPU s", ".0f", "s"),
    Column("simulated step of ours, CPU s", ".2f", "s"),
    Column("of the even split, CPU s", ".2f", "s"),
)


def setting_of(nodes: int) -> Setting:
    return Setting(MODEL, WORKLOAD, nodes=nodes, groups=round(_GROUPS * nodes), first=STEPS)


def _cells(quick: bool) -> list[Cell]:
    cells = []
    for nodes in _QUICK_NODES if quick else NODES:
        setting = setting_of(nodes)
        cells.append(search_cell(setting, "even", f"search, {setting.gpus} GPUs, even"))
        cells.append(choice_cell(setting, {}, f"choice, {setting.gpus} GPUs"))
        for system in SYSTEMS:
            arguments = {"setting": setting.arguments(), "system": system}
            cost = nodes * STEPS * (20.0 if system == "ours" else 1.0)
            cells.append(Cell(f"{setting.gpus} GPUs, {system}", scale, arguments, setting.files, cost))
    return cells


def _found(results: Sequence[Result]) -> Found:
    runs: dict[str, dict[int, Values]] = {system: {} for system in SYSTEMS}
    for result in results:
        if result.cell.function is scale:
            runs[result.cell.arguments["system"]][_gpus(result)] = result.values
    searched, chosen = _seconds(results, search), _seconds(results, choose)
    body = {}
    for gpus, ours in runs["ours"].items():
        even = runs["even"][gpus]
        body[f"{gpus:,}"] = (
            ours["throughput"] / gpus,
            even["throughput"] / gpus,
            ours["throughput"] / even["throughput"],
            ours["planning"],
            searched[gpus],
            ours["simulating"] / STEPS,
            even["simulating"] / STEPS,
        )
    more = [Row(f"{gpus:,} GPUs", "one choice by simulation", it, "s CPU") for gpus, it in chosen.items()]
    return Found({"sizes": Table("GPUs", _COLUMNS, body)}, _figures(runs, searched), more)


def _figures(runs: Mapping[str, Mapping[int, Values]], searched: Mapping[int, float]) -> dict[str, Figure]:
    where, sizes = f"A800, {model_name(setting_of(NODES[0]))}, {WORKLOAD}", Axis("GPUs", doubling=True)
    each = [
        Line(name, [(gpus, it["throughput"] / gpus) for gpus, it in runs[system].items()], like=number_of(system))
        for name, system in (("ours", "ours"), ("even split", "even"))
    ]
    ours, even = runs["ours"].items(), runs["even"].items()
    times = [
        Line("one plan", [(gpus, it["planning"]) for gpus, it in ours]),
        Line("a simulated step of ours", [(gpus, it["simulating"] / STEPS) for gpus, it in ours]),
        Line("search of the even split's choice", list(searched.items())),
        Line("a simulated step of the even split", [(gpus, it["simulating"] / STEPS) for gpus, it in even]),
    ]
    return {
        "throughput": LineChart(
            f"Throughput of a GPU: {where}",
            "Generated tokens that were trained on, per second and GPU, by the number of GPUs; the batch grows with"
            " them.",
            each,
            sizes,
            Axis("tokens per second and GPU"),
        ),
        "seconds": LineChart(
            f"What deciding and simulating cost: {where}",
            "CPU seconds by the number of GPUs: of one plan, of the search for what the even split leaves open, and of"
            " one simulated step of either.",
            times,
            sizes,
            Axis("CPU seconds", logarithmic=True),
        ),
    }


def _seconds(results: Sequence[Result], function: Callable[..., Values]) -> dict[int, float]:
    """CPU seconds of the cells of a function, by GPUs."""
    return {_gpus(result): result.cpu_seconds for result in results if result.cell.function is function}


def _gpus(result: Result) -> int:
    return Setting(**result.cell.arguments["setting"]).gpus


EXPERIMENT = Experiment(
    "scaling",
    "Size of the cluster",
    "From 16 to 1,024 GPUs: what is a GPU worth, and what do planning and simulating cost?",
    _cells,
    _found,
)
