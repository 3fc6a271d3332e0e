"""Error of the planner's predicted step against the simulated one.

Invariant: a case is predicted before it is simulated, by factors fitted to other families and seeds; published numbers
are those of Libra (arXiv 2606.03077), for its own cost model and cluster, and only stand beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.estimates import mean
from benchmarks.evaluation.experiment import Column, Experiment, Found, Table, Value
from benchmarks.evaluation.predicted_step import FIRST_SEED, step
from benchmarks.evaluation.setting import shape_file
from benchmarks.rows import Row, at_most
from tests.oracles.random_clusters import MODELS, TESTED

STALENESS = (0, 1, 4)
MEAN_GOAL, LARGEST_GOAL = 6.0, 15.0  # percent
PUBLISHED = ("100", "", "6.35 %", "9.30 %", "")  # end to end, over 100 configurations
_CASES, _QUICK_CASES = 100, 9


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


def error(result: Result, what: str = "") -> float:
    """Percent by which the predicted step is longer than the simulated one; with `_training`, by which training is."""
    return 100 * (float(result.values[f"predicted{what}"]) / float(result.values[f"simulated{what}"]) - 1)


def _groups(results: Sequence[Result]) -> dict[str, list[Result]]:
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


def _found(results: Sequence[Result]) -> Found:
    columns = (
        Column("number"),
        Column("mean error", "+.1f", "%"),
        Column("mean abs. error", ".1f", "%"),
        Column("largest abs. error", ".1f", "%"),
        Column("beyond 15 %"),
    )
    body: dict[str, Sequence[Value]] = {}
    for name, its in _groups(results).items():
        errors = [error(it) for it in its]
        sizes = [abs(it) for it in errors]
        beyond = sum(size > LARGEST_GOAL for size in sizes)
        body[name] = (len(its), fmean(errors), fmean(sizes), max(sizes), beyond)
    body["published, end to end"] = PUBLISHED
    sizes = [abs(error(it)) for it in results]
    more = [
        at_most("goals", "mean |error|", fmean(sizes), "%", MEAN_GOAL),
        at_most("goals", "largest |error|", max(sizes), "%", LARGEST_GOAL),
        Row("all", "training: mean |error|", fmean(abs(error(it, "_training")) for it in results), "%"),
        Row("all", "half width of a simulated mean's 95 % interval", fmean(map(_width, results)), "%"),
    ]
    return Found({"errors": Table("cases", columns, body)}, {}, more)


def _width(result: Result) -> float:
    """Half width of the interval of the mean step, in percent of the mean. Batches that start together end in short
    succession, so a long step is followed by short ones. Means over the steps that start together are nearly
    independent."""
    together, each = 1 + int(result.cell.arguments["staleness"]), result.values["each"]
    found = mean([fmean(each[k : k + together]) for k in range(0, len(each) - together + 1, together)])
    assert found.ends is not None
    return 100 * (found.ends[1] - found.ends[0]) / 2 / found.value


EXPERIMENT = Experiment(
    "step-price",
    "Predicted and simulated seconds of a step",
    "How close is the predicted time of a step to the simulated one, over random clusters, models and workloads?",
    _cells,
    _found,
)
