"""Information in real agents' tool returns about the tokens to come, and the worth of routing by it.

Invariant: every number is of logs that are not part of the repository; without them there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.intervals import Interval, mean_interval, ratio_interval
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.routing_real_cell import (
    MEASURES,
    MODEL,
    OURS,
    PREDICTORS,
    RESAMPLES,
    THEIRS,
    makespan,
    predictions,
)
from benchmarks.evaluation.routing_real_data import lacking, present
from benchmarks.rows import Row

LEAST_LOADED = "least-loaded"
ROUTES = (OURS, THEIRS, LEAST_LOADED)
SPLITS = (("airline", "prompts"), ("airline", "samples"), ("claude-code", "prompts"))  # it has one sample of a prompt
_SEEDS, _QUICK_SEEDS = 5, 2


@dataclass(frozen=True, slots=True)
class Case:
    """A log that is replayed, with the times that persons took to answer or without."""

    log: str
    waits: bool

    @property
    def name(self) -> str:
        return f"{self.log}, persons' waits" if self.waits else self.log


CASES = (Case("airline", False), Case("claude-code", False), Case("claude-code", True))

Runs = Mapping[Case, list[Mapping[str, Any]]]  # by case: of the seeds


def _cells(quick: bool) -> list[Cell]:
    judged = [
        Cell(
            f"{log}, unseen {unseen}",
            predictions,
            {"log": log, "unseen": unseen, "seed": 0},
            inputs=present(log),
            cost=100,
        )
        for log, unseen in SPLITS
    ]
    return judged + [
        Cell(
            f"{case.name}, seed {seed}",
            makespan,
            {"log": case.log, "waits": case.waits, "seed": seed, "routes": list(ROUTES)},
            inputs=(*present(case.log), shape_file(MODEL)),
            cost=1,
        )
        for case in CASES
        for seed in range(_QUICK_SEEDS if quick else _SEEDS)
    ]


def _judged(results: Sequence[Result]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Values of the predictions, by log and by `unseen`: prompts, or samples."""
    asked = [(result.cell.arguments, result.values) for result in results]
    return {(it["log"], it["unseen"]): values for it, values in asked if "unseen" in it}


def _runs(results: Sequence[Result]) -> Runs:
    runs: dict[Case, list[Mapping[str, Any]]] = {}
    for result in results:
        asked = result.cell.arguments
        if "routes" in asked:
            runs.setdefault(Case(asked["log"], asked["waits"]), []).append(result.values)
    return runs


def ratio(seeds: Sequence[Mapping[str, Any]], route: str, other: str, measure: str = "seconds") -> Interval:
    """Ratio of a measure of the same trajectories by two routers: below 1 where the first is faster."""
    return ratio_interval([it[route][measure] for it in seeds], [it[other][measure] for it in seeds])


def _rows(results: Sequence[Result]) -> list[Row]:
    rows = []
    for (log, unseen), values in _judged(results).items():
        for measure in MEASURES:
            for name in (*PREDICTORS, *(f"{OURS} - {other}" for other in PREDICTORS[1:])):
                rows.append(Row(f"{log}, unseen {unseen}", f"{measure}: {name}", values[measure][name][0], ""))
    for case, seeds in _runs(results).items():
        for route in ROUTES:
            value = mean_interval([it[route]["seconds"] for it in seeds]).value
            rows.append(Row(f"rollout of {case.name}", route, value, "s"))
        for other in ROUTES[1:]:
            rows.append(Row(f"rollout of {case.name}", f"{OURS} / {other}", ratio(seeds, OURS, other).value, "x"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    return {"predictions": _predictions(results), "makespan": _makespan(_runs(results))}


def _predictions(results: Sequence[Result]) -> str:
    body = []
    for (log, unseen), values in _judged(results).items():
        for measure in MEASURES:
            cells = [_between(values[measure][name]) for name in PREDICTORS]
            cells += [_between(values[measure][f"{OURS} - {name}"], signed=True) for name in PREDICTORS[1:]]
            body.append([f"{log}, unseen {unseen}, {values['returns']:,} returns: {measure}", *cells])
    header = ["remaining tokens", *PREDICTORS, *(f"{OURS} - {name}" for name in PREDICTORS[1:])]
    said = (
        f"In brackets: 95 % intervals, {RESAMPLES:,} bootstrap samples of whole prompts. Of an unseen prompt the"
        " published tree says the mean of all others, whatever its tools returned. Such a mean is the lower, the longer"
        " the trajectories of the prompts that it lacks: that alone pulls its rank correlation below 0."
    )
    return f"{markdown_table(header, body)}\n\n{said}"


def _makespan(runs: Runs) -> str:
    body = []
    for case, seeds in runs.items():
        cells = [f"{mean_interval([it[route]['seconds'] for it in seeds]).value:,.1f}" for route in ROUTES]
        cells += [_around(ratio(seeds, OURS, other)) for other in ROUTES[1:]]
        cells += [_around(ratio(seeds, OURS, other, "mean")) for other in ROUTES[1:]]
        body.append([case.name, *cells])
    header = ["seconds of the rollout", *ROUTES]
    header += [f"{OURS} / {other}" for other in ROUTES[1:]] + [f"mean of trajectories: / {it}" for it in ROUTES[1:]]
    count = len(next(iter(runs.values())))
    plans = {case: [len(it["plan"]) for it in seeds] for case, seeds in runs.items()}
    buckets = "; ".join(f"{case.name} {', '.join(map(str, its))}" for case, its in plans.items())
    said = (
        f"512 trajectories at once, {count} seeds; ratios are paired, with 95 % intervals. Routers know one half of the"
        " prompts and serve the other. A tool whose time was not recorded takes 1 s, and so does a person, except"
        f" where their waits are named. Buckets of the plans by seed: {buckets}."
    )
    return f"{markdown_table(header, body)}\n\n{said}"


def _figures(results: Sequence[Result]) -> dict[str, str]:
    runs = _runs(results)
    series = []
    for route in ROUTES[:-1]:
        found = [ratio(seeds, route, LEAST_LOADED) for seeds in runs.values()]
        series.append(Bars(route, tuple(it.value for it in found), tuple((it.low, it.high) for it in found)))
    series.append(Bars(LEAST_LOADED, (1.0,) * len(runs), (None,) * len(runs)))
    return {
        "makespan": grouped_bars(
            "Rollout of 512 trajectories of real agents: time by router",
            "Seconds from the first request to the last finish, as a multiple of those under the least-loaded router,"
            " simulated on 48 A800 planned with two buckets at most. Error bars: 95 % intervals of the ratio over"
            " seeds.",
            [case.name for case in runs],
            series,
            "time of the rollout, least-loaded = 1",
            decimals=2,
        )
    }


def _between(found: Sequence[float], signed: bool = False) -> str:
    form = "+.2f" if signed else ".2f"
    value, low, high = found
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _around(one: Interval) -> str:
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"


EXPERIMENT = Experiment(
    name="routing-real",
    title="Routing on logs of real agents",
    question="What do the tool returns of real agents say of the tokens to come, and what is routing by it worth?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
    lacks=lacking,
)
