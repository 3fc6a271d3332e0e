"""From 16 to 1,024 GPUs: what a GPU is worth, and what it costs to plan and to simulate.

Invariant: the batch grows in proportion to the cluster, so that every GPU has as much to do. CPU seconds depend on the
machine; throughput does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Line, lines
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.palette import number_of
from benchmarks.evaluation.plan_choices import choice_cell, choose
from benchmarks.evaluation.runs import Values, model_name
from benchmarks.evaluation.scale import doubling_axis, log_axis, measured_axis
from benchmarks.evaluation.scaling_cell import scale
from benchmarks.evaluation.searches import search, search_cell
from benchmarks.evaluation.setting import Setting
from benchmarks.rows import Row

MODEL, WORKLOAD = "Qwen/Qwen3-14B", "search_r1"
NODES = (2, 4, 8, 16, 32, 64, 128)
_QUICK_NODES = NODES[:2]
SYSTEMS = ("ours", "even")
STEPS = 15  # the first of a run: two decisions are in them
_GROUPS = 32 / 6  # of a step, for each node

Found = Mapping[str, Mapping[int, Values]]  # by system and GPUs


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
    found: dict[str, dict[int, Values]] = {system: {} for system in SYSTEMS}
    for result in results:
        if result.cell.function is scale:
            gpus = Setting(**result.cell.arguments["setting"]).gpus
            found[result.cell.arguments["system"]][gpus] = result.values
    return found


def searching(results: Sequence[Result]) -> dict[int, float]:
    """CPU seconds of the searches for what the even split leaves open, by GPUs."""
    return _seconds(results, search)


def _seconds(results: Sequence[Result], function: Callable[..., Values]) -> dict[int, float]:
    """CPU seconds of the cells of a function, by GPUs."""
    found = [result for result in results if result.cell.function is function]
    return {Setting(**result.cell.arguments["setting"]).gpus: result.cpu_seconds for result in found}


def _rows(results: Sequence[Result]) -> list[Row]:
    found, searched, chosen = _found(results), searching(results), _seconds(results, choose)
    rows = []
    for gpus, ours in found["ours"].items():
        case, even = f"{gpus:,} GPUs", found["even"][gpus]
        rows += [Row(case, name, found[name][gpus]["throughput"] / gpus, "tokens/s and GPU") for name in SYSTEMS]
        rows.append(Row(case, "ours over even", ours["throughput"] / even["throughput"], "x"))
        rows.append(Row(case, "one plan", ours["planning"], "s CPU"))
        rows.append(Row(case, "one choice by simulation", chosen[gpus], "s CPU"))
        rows.append(Row(case, "search of the even split's choice", searched[gpus], "s CPU"))
        rows.append(Row(case, "simulating a step of even", even["simulating"] / STEPS, "s CPU"))
        rows.append(Row(case, "simulating a step of ours, replanning included", ours["simulating"] / STEPS, "s CPU"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    found, searched = _found(results), searching(results)
    header = ["GPUs", "ours, tokens/s and GPU", "even split, tokens/s and GPU", "ours over it", "one plan, CPU s"]
    header += ["search of the even split's choice, CPU s", "simulated step of ours, CPU s", "of the even split, CPU s"]
    body = []
    for gpus, ours in found["ours"].items():
        even = found["even"][gpus]
        body.append(
            [
                f"{gpus:,}",
                f"{ours['throughput'] / gpus:.1f}",
                f"{even['throughput'] / gpus:.1f}",
                f"{ours['throughput'] / even['throughput']:.2f}",
                f"{ours['planning']:.1f}",
                f"{searched[gpus]:.0f}",
                f"{ours['simulating'] / STEPS:.2f}",
                f"{even['simulating'] / STEPS:.2f}",
            ]
        )
    return {"sizes": markdown_table(header, body)}


def _figures(results: Sequence[Result]) -> dict[str, str]:
    found, model = _found(results), model_name(setting_of(NODES[0]))
    sizes = doubling_axis("GPUs", min(found["ours"]), max(found["ours"]))
    each = [
        Line(name, tuple((gpus, it["throughput"] / gpus) for gpus, it in found[system].items()), like=number_of(system))
        for name, system in (("ours", "ours"), ("even split", "even"))
    ]
    ours, even = found["ours"].items(), found["even"].items()
    times = [
        Line("one plan", tuple((gpus, values["planning"]) for gpus, values in ours)),
        Line("a simulated step of ours", tuple((gpus, values["simulating"] / STEPS) for gpus, values in ours)),
        Line("search of the even split's choice", tuple(searching(results).items())),
        Line("a simulated step of the even split", tuple((g, values["simulating"] / STEPS) for g, values in even)),
    ]
    return {
        "throughput": lines(
            f"Throughput of a GPU: A800, {model}, {WORKLOAD}",
            "Generated tokens that were trained on, per second and GPU, by the number of GPUs; the batch grows with"
            " them.",
            each,
            sizes,
            measured_axis("tokens per second and GPU", [y for line in each for _, y in line.points]),
        ),
        "seconds": lines(
            f"What deciding and simulating cost: A800, {model}, {WORKLOAD}",
            "CPU seconds by the number of GPUs: of one plan, of the search for what the even split leaves open, and of"
            " one simulated step of either.",
            times,
            sizes,
            log_axis("CPU seconds", [y for line in times for _, y in line.points]),
        ),
    }


EXPERIMENT = Experiment(
    name="scaling",
    title="Size of the cluster",
    question="From 16 to 1,024 GPUs: what is a GPU worth, and what do planning and simulating cost?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
