"""Whether a better plan lies near the planner's.

Invariant: plan and neighbours are simulated on the same batches; what is said of the best neighbour is also said on
batches that had no part in choosing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.neighbourhood_cell import near
from benchmarks.evaluation.page import markdown_table
from benchmarks.rollout_price_cases import MODELS, TESTED
from benchmarks.rows import Row

STALENESS = (1, 4)
FIRST_SEED = 4_000
GOAL = 2.0  # percent
_SEEDS = 2

Values = Mapping[str, Any]


def _cells(quick: bool) -> list[Cell]:
    return [
        Cell(
            f"{family} {seed}, staleness {staleness}",
            near,
            {"family": family, "seed": seed, "staleness": staleness},
            tuple(shape_file(model) for model in MODELS),
            cost=1 + staleness,
        )
        for staleness in STALENESS
        for family in TESTED
        for seed in range(FIRST_SEED, FIRST_SEED + (1 if quick else _SEEDS))
    ]


def best(values: Values) -> Mapping[str, Any]:
    """The neighbour with the shortest simulated step."""
    return min(values["neighbours"], key=lambda it: float(it["simulated"]))


def behind(values: Values) -> float:
    """Percent by which the plan's step is longer than that of the best neighbour; 0 where none is better."""
    return max(0.0, 100 * (float(values["simulated"]) / float(best(values)["simulated"]) - 1))


def behind_afresh(values: Values) -> float:
    """The same percent on batches that had no part in choosing the neighbour: below 0 where it is worse there.
    0 where no neighbour was better to begin with."""
    fresh = values["fresh"]
    return 100 * (float(fresh["plan"]) / float(fresh["best"]) - 1) if behind(values) > 0 else 0.0


def _rows(results: Sequence[Result]) -> list[Row]:
    rows = []
    for result in results:
        values = result.values
        rows += [
            Row(result.cell.name, "neighbours", len(values["neighbours"]), ""),
            Row(result.cell.name, "plan behind the best of them", behind(values), "%"),
            Row(result.cell.name, "on fresh batches", behind_afresh(values), "%"),
        ]
    for what, found in (
        ("plan behind the best neighbour", [behind(it.values) for it in results]),
        ("on fresh batches", [behind_afresh(it.values) for it in results]),
    ):
        case, goal = f"{len(results)} cases", f"at most {GOAL:g} %"
        rows.append(Row(case, f"{what}: mean", fmean(found), "%", goal, fmean(found) <= GOAL))
        rows.append(Row(case, f"{what}: largest", max(found), "%", goal, max(found) <= GOAL))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    header = ["case", "GPUs", "that train", "engines", "predicted, s", "simulated, s", "neighbours", "best of them"]
    header += ["its s", "plan behind", "on fresh batches"]
    body = []
    for result in results:
        values = result.values
        nearest, plan = best(values), values["plan"]
        engines = " + ".join(f"{count} {shape}" for shape, count in plan["engines"])
        row = [result.cell.name, f"{values['devices']}", f"{plan['training']}", engines]
        row += [f"{values['predicted']:.1f}", f"{values['simulated']:.1f}", f"{len(values['neighbours'])}"]
        row += [nearest["what"], f"{nearest['simulated']:.1f}", f"{behind(values):.1f} %"]
        body.append([*row, f"{behind_afresh(values):.1f} %"])
    return {"cases": markdown_table(header, body)}


def _figures(results: Sequence[Result]) -> dict[str, str]:
    found = [result.values for result in results]
    shortest = [min(float(it["simulated"]), float(best(it)["simulated"])) for it in found]
    plan = tuple(100 * (float(it["simulated"]) / least - 1) for it, least in zip(found, shortest, strict=True))
    middle = tuple(
        100 * (sorted(float(other["simulated"]) for other in it["neighbours"])[len(it["neighbours"]) // 2] / least - 1)
        for it, least in zip(found, shortest, strict=True)
    )
    return {
        "behind": grouped_bars(
            "Steps of the plan and of its neighbours, over the shortest of them",
            "Percent by which the simulated step of the plan, and that of its middle neighbour, are longer than the"
            " shortest of the plan and all of its neighbours, by case.",
            [result.cell.name.replace(", staleness", " /") for result in results],
            [Bars("the plan", plan), Bars("its middle neighbour", middle)],
            "percent longer than the shortest",
            "case / staleness",
            decimals=1,
        )
    }


EXPERIMENT = Experiment(
    name="neighbourhood",
    title="The plan and its neighbours",
    question="Is there a plan near the planner's whose simulated step is shorter, and by how much?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
