"""Error of the planner's predicted step against the simulated one.

Invariant: a case is predicted before it is simulated, by factors fitted to other families and seeds; published numbers
are those of Libra (arXiv 2606.03077), for its own cost model and cluster, and only stand beside ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.intervals import mean_interval
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.palette import MUTED
from benchmarks.evaluation.scale import log_axis
from benchmarks.evaluation.sheet import Key, draw_x_ticks, file, join, legend, mark, path, sheet, tag, y_grid
from benchmarks.evaluation.step_price_cell import FIRST_SEED, step
from benchmarks.rollout_price_cases import MODELS, TESTED
from benchmarks.rows import Row

STALENESS = (0, 1, 4)
MEAN_GOAL, LARGEST_GOAL = 6.0, 15.0  # percent
PUBLISHED = {"mean": 6.35, "largest": 9.30}  # percent, end to end, over 100 configurations
_CASES, _QUICK_CASES = 100, 9

Groups = Mapping[str, Sequence[Result]]


def _cells(quick: bool) -> list[Cell]:
    """Staleness in turn, and families so that each meets each staleness."""
    cells, shapes = [], tuple(shape_file(model) for model in MODELS)
    for number in range(_QUICK_CASES if quick else _CASES):
        staleness = STALENESS[number % len(STALENESS)]
        family = TESTED[(number + number // len(STALENESS)) % len(TESTED)]
        asked = {"family": family, "seed": FIRST_SEED + number, "staleness": staleness}
        name = f"{family} {FIRST_SEED + number}, staleness {staleness}"
        cells.append(Cell(name, step, asked, shapes, cost=1 + staleness))
    return cells


def error(result: Result) -> float:
    """Percent by which the predicted step is longer than the simulated one."""
    return 100 * (float(result.values["predicted"]) / float(result.values["simulated"]) - 1)


def _training_error(result: Result) -> float:
    values = result.values
    return 100 * (float(values["predicted_training"]) / float(values["simulated_training"]) - 1)


def _groups(results: Sequence[Result]) -> Groups:
    """Results by staleness, family, number of buckets and kind of model, if there are any; all of them first."""
    groups: dict[str, list[Result]] = {"all": list(results)}
    for staleness in STALENESS:
        groups[f"staleness {staleness}"] = [it for it in results if it.cell.arguments["staleness"] == staleness]
    for family in TESTED:
        groups[family] = [it for it in results if it.cell.arguments["family"] == family]
    groups["one bucket"] = [it for it in results if len(it.values["buckets"]) == 1]
    groups["several buckets"] = [it for it in results if len(it.values["buckets"]) > 1]
    groups["dense models"] = [it for it in results if not it.values["experts"]]
    groups["mixtures of experts"] = [it for it in results if it.values["experts"]]
    return {name: found for name, found in groups.items() if found}


def _rows(results: Sequence[Result]) -> list[Row]:
    rows = []
    for name, found in _groups(results).items():
        case, errors = f"{name}: {len(found)} cases", [error(it) for it in found]
        mean, largest = fmean(map(abs, errors)), max(map(abs, errors))
        rows += [
            Row(case, "mean |error|", mean, "%", f"at most {MEAN_GOAL:g} %", mean <= MEAN_GOAL),
            Row(case, "largest |error|", largest, "%", f"at most {LARGEST_GOAL:g} %", largest <= LARGEST_GOAL),
            Row(case, "mean error", fmean(errors), "%"),
            Row(case, f"cases beyond {LARGEST_GOAL:g} %", sum(abs(it) > LARGEST_GOAL for it in errors), ""),
        ]
    rows.append(Row("all", "training: mean |error|", fmean(abs(_training_error(it)) for it in results), "%"))
    rows.append(Row("all", "half width of a simulated mean's 95 % interval", fmean(map(_width, results)), "%"))
    return rows


def _width(result: Result) -> float:
    """Half width of the interval of the mean step, in percent of the mean. Batches that start together end in short
    succession, so a long step is followed by short ones. Means over the steps that start together are nearly
    independent."""
    together, each = 1 + int(result.cell.arguments["staleness"]), result.values["each"]
    found = mean_interval([fmean(each[k : k + together]) for k in range(0, len(each) - together + 1, together)])
    return 100 * (found.high - found.low) / 2 / found.value


def _tables(results: Sequence[Result]) -> dict[str, str]:
    header = ["cases", "number", "mean error", "mean abs. error", "largest abs. error", "beyond 15 %"]
    body = []
    for name, found in _groups(results).items():
        errors = [error(it) for it in found]
        sizes = [abs(it) for it in errors]
        beyond = sum(size > LARGEST_GOAL for size in sizes)
        body.append(
            [
                name,
                str(len(found)),
                f"{fmean(errors):+.1f} %",
                f"{fmean(sizes):.1f} %",
                f"{max(sizes):.1f} %",
                f"{beyond}",
            ]
        )
    body.append(["published, end to end", "100", "", f"{PUBLISHED['mean']} %", f"{PUBLISHED['largest']:.2f} %", ""])
    return {"errors": markdown_table(header, body)}


def _figures(results: Sequence[Result]) -> dict[str, str]:
    keys = [Key(f"staleness {staleness}", number, False) for number, staleness in enumerate(STALENESS)]
    names, lines = legend(keys, boxes=False)
    paper = sheet(lines)
    values = [float(it.values[which]) for it in results for which in ("predicted", "simulated")]
    across, up = (log_axis(f"{which} seconds of a step", values) for which in ("simulated", "predicted"))
    inner = replace(paper, left=paper.left + 12, right=paper.right + 12)

    def at(simulated: float, predicted: float) -> tuple[float, float]:
        return across.place(simulated, inner.left, inner.x_end), up.place(predicted, paper.y_end, paper.top)

    equal = tag("polyline", points=path([at(end, end) for end in (across.low, across.high)]), fill="none", stroke=MUTED)
    marks = [
        mark(*at(it.values["simulated"], it.values["predicted"]), key, f"{it.cell.name}: {error(it):+.1f} %", 3.5)
        for key, staleness in zip(keys, STALENESS, strict=True)
        for it in results
        if it.cell.arguments["staleness"] == staleness
    ]
    return {
        "seconds": file(
            f"Predicted and simulated steps of {len(results)} random clusters and workloads",
            "Predicted against simulated seconds of an optimiser step, a mark for each case, both on logarithmic axes;"
            " on the line they are equal.",
            paper,
            names,
            join(y_grid(up, paper), equal, draw_x_ticks(across, inner)),
            *marks,
        )
    }


EXPERIMENT = Experiment(
    name="step-price",
    title="Predicted and simulated seconds of a step",
    question="How near is the planner's step to the simulated one, over random clusters, models and workloads?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
