"""Accuracy of policies that route to buckets, by how much tool returns tell.

Invariant: published numbers are those of Libra (arXiv 2606.03077) on Search-R1, and only stand beside ours. Definitions
of the measures are those of `benchmarks.workloads.routing_quality`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.intervals import Interval, mean_interval
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.routing_strong_cell import PREDICTED, ROUTED, judge
from benchmarks.rows import Row
from benchmarks.workloads.baselines import PUBLISHED
from benchmarks.workloads.definition import FILES

PUBLISHED_MIGRATED = 0.082  # of tokens, by C-MLFQ
OURS, THEIRS = "cmlfq", "cmlfq-published"
FIGURE = ("mlfq", "length-predictor", THEIRS, OURS)
_SEEDS, _QUICK_SEEDS = 3, 2


@dataclass(frozen=True, slots=True)
class Case:
    """A workload with one setting of how much tool returns tell, its drift taken in `steps` steps."""

    workload: str
    signal: str
    steps: int

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.signal}, {self.steps} steps"


# The one that published numbers are held against is run whole. The others take the same drift in half of the steps, so
# prompts come back half as often; `strong` is among them, so that signals can be compared.
CASES = (
    Case("search_r1", "strong", 60),
    Case("search_r1", "strong", 30),
    Case("search_r1", "medium", 30),
    Case("search_r1", "airline", 30),
    Case("search_r1", "none", 30),
    Case("dapo_math", "strong", 30),
    Case("r2e_gym", "strong", 30),
)

Runs = Mapping[Case, list[Mapping[str, Any]]]  # by case: of the seeds


def _cells(quick: bool) -> list[Cell]:
    return [
        Cell(
            f"{case.name}, seed {seed}",
            judge,
            {"workload": case.workload, "signal": case.signal, "steps": case.steps, "seed": seed},
            inputs=(FILES / f"{case.workload}.json",),
            cost=case.steps * (5 if case.workload == "r2e_gym" else 1),
        )
        for case in (CASES[1:3] if quick else CASES)
        for seed in range(_QUICK_SEEDS if quick else _SEEDS)
    ]


def _runs(results: Sequence[Result]) -> Runs:
    runs: dict[Case, list[Mapping[str, Any]]] = {}
    for result in results:
        asked = result.cell.arguments
        runs.setdefault(Case(asked["workload"], asked["signal"], asked["steps"]), []).append(result.values)
    return runs


def measured(seeds: Sequence[Mapping[str, Any]], name: str, measure: str) -> Interval:
    """Mean of a measure over seeds, in percent. `name` is a policy or one of `PREDICTED`."""
    return mean_interval([100 * _of(values, name)[measure] for values in seeds])


def difference(seeds: Sequence[Mapping[str, Any]], name: str, other: str, measure: str) -> Interval:
    """Difference of the first from the other on the same trajectories, in percentage points: the mean over seeds."""
    return mean_interval([100 * (_of(values, name)[measure] - _of(values, other)[measure]) for values in seeds])


def _of(values: Mapping[str, Any], name: str) -> Mapping[str, float]:
    found: Mapping[str, float] = values["predicted"][name] if name in PREDICTED else values[name]
    return found


def _majority(seeds: Sequence[Mapping[str, Any]]) -> Interval:
    return mean_interval([100 * values["majority"] for values in seeds])


def _rows(results: Sequence[Result]) -> list[Row]:
    rows = []
    for case, seeds in _runs(results).items():
        rows.append(Row(case.name, "majority rate", _majority(seeds).value, "%"))
        for name in (*ROUTED, *PREDICTED):
            who = _who(name)
            rows.append(Row(case.name, f"{who}: accuracy", measured(seeds, name, "accuracy").value, "%"))
            rows.append(Row(case.name, f"{who}: balanced", measured(seeds, name, "balanced").value, "%"))
            if name in ROUTED:
                rows.append(Row(case.name, f"{who}: migrated", measured(seeds, name, "migrated").value, "% of tokens"))
        for name in (OURS, *PREDICTED):
            value = difference(seeds, name, THEIRS, "accuracy").value
            rows.append(Row(case.name, f"{_who(name)} - {THEIRS}: accuracy", value, "points"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    runs = _runs(results)
    whole = next(iter(runs))
    return {"policies": _policies(whole, runs[whole]), "signals": _signals(runs), "differences": _differences(runs)}


def _policies(case: Case, seeds: Sequence[Mapping[str, Any]]) -> str:
    """All policies in one case, beside what is published."""
    body = []
    for name in (*ROUTED, *PREDICTED):
        published = PUBLISHED.get(name)
        migrated = f"{100 * PUBLISHED_MIGRATED:.1f}" if name == THEIRS else ""
        body.append(
            [
                _who(name),
                _written(measured(seeds, name, "accuracy")),
                "" if published is None else f"{100 * published:.1f}",
                _written(measured(seeds, name, "balanced")),
                _written(measured(seeds, name, "migrated")) if name in ROUTED else "",
                migrated,
            ]
        )
    header = ["policy", "accuracy, %", "published", "balanced, %", "tokens migrated, %", "published"]
    said = (
        f"{case.name}, {len(seeds)} seeds, ± 95 %. The most frequent bucket has {_written(_majority(seeds))} % of the"
        " trajectories. No engine has any load, and none is faster than another; there `cmlfq`, which places by"
        " expected cost, sees no reason against the longest bucket, from which nothing ever has to be moved. The last"
        " two lines are the buckets that its prediction names at the same moments."
    )
    return f"{markdown_table(header, body)}\n\n{said}"


def _signals(runs: Runs) -> str:
    """Single-shot accuracy of all policies in all cases."""
    names = (*ROUTED, *PREDICTED)
    body = [["majority rate", *(_written(_majority(seeds)) for seeds in runs.values())]]
    body += [[_who(name), *(_written(measured(seeds, name, "accuracy")) for seeds in runs.values())] for name in names]
    return markdown_table(["accuracy, %", *(case.name for case in runs)], body)


def _differences(runs: Runs) -> str:
    """Paired, against C-MLFQ as published."""
    body = []
    for case, seeds in runs.items():
        cells = [_signed(difference(seeds, name, THEIRS, "accuracy")) for name in (OURS, *PREDICTED)]
        cells += [_signed(difference(seeds, name, THEIRS, "balanced")) for name in (OURS, *PREDICTED)]
        body.append([case.name, *cells, _signed(difference(seeds, OURS, THEIRS, "migrated"))])
    header = ["points more than cmlfq-published"]
    header += [f"{measure}: {what}" for measure in ("accuracy", "balanced") for what in ("placed", *PREDICTED)]
    return markdown_table([*header, "tokens migrated"], body)


def _figures(results: Sequence[Result]) -> dict[str, str]:
    runs = _runs(results)
    series = []
    for name in (*FIGURE, PREDICTED[1]):
        found = [measured(seeds, name, "accuracy") for seeds in runs.values()]
        theirs = None if name not in PUBLISHED else 100 * PUBLISHED[name]
        intervals = tuple((max(0.0, it.low), min(100.0, it.high)) for it in found)
        series.append(Bars(_who(name), (theirs, *(it.value for it in found)), (None, *intervals)))
    majority = [_majority(seeds) for seeds in runs.values()]
    ends = tuple((max(0.0, it.low), min(100.0, it.high)) for it in majority)
    series.append(Bars("majority rate", (None, *(it.value for it in majority)), (None, *ends)))
    return {
        "accuracy": grouped_bars(
            "Trajectories in the right bucket after their first tool return",
            "Single-shot accuracy in percent of four policies and of the most likely bucket that cmlfq predicts, beside"
            " the share of the most frequent bucket, for workloads whose tool returns tell more or less. Error bars: 95"
            " % intervals of the mean over seeds. The first group is as published in arXiv 2606.03077.",
            ["published, Search-R1", *(case.name for case in runs)],
            series,
            "trajectories, %",
        )
    }


def _who(name: str) -> str:
    return f"cmlfq predicts: {name} bucket" if name in PREDICTED else name


def _written(one: Interval) -> str:
    return f"{one.value:.1f} ± {one.high - one.value:.1f}"


def _signed(one: Interval) -> str:
    return f"{one.value:+.1f} ± {one.high - one.value:.1f}"


EXPERIMENT = Experiment(
    name="routing-strong",
    title="Routing to the right bucket",
    question="How often is a trajectory in the bucket of its final context after its first tool return?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
