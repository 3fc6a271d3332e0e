"""Information in real agents' tool returns about the tokens to come, and the worth of routing by it.

Invariant: every number is of logs that are not part of the repository; without them there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evaluation.agent_logs import lacking, present
from benchmarks.evaluation.agent_routing import MEASURES, MODEL, OURS, PREDICTORS, THEIRS, makespan, predictions
from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import shape_file
from benchmarks.evaluation.estimates import RESAMPLES, Estimate, mean
from benchmarks.evaluation.estimates import ratio as paired
from benchmarks.evaluation.experiment import Experiment, Found
from benchmarks.evaluation.figures import BarChart, Bars
from benchmarks.evaluation.table import Column, Table, Value

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


def ratio(seeds: Sequence[Mapping[str, Any]], route: str, other: str, measure: str = "seconds") -> Estimate:
    """Ratio of a measure of the same trajectories by two routers: below 1 where the first is faster."""
    return paired([it[route][measure] for it in seeds], [it[other][measure] for it in seeds])


def _found(results: Sequence[Result]) -> Found:
    runs: dict[Case, list[Mapping[str, Any]]] = {}
    for result in results:
        asked = result.cell.arguments
        if "routes" in asked:
            runs.setdefault(Case(asked["log"], asked["waits"]), []).append(result.values)
    return Found({"predictions": _predictions(results), "makespan": _makespan(runs)}, {"makespan": _figure(runs)})


def _predictions(results: Sequence[Result]) -> Table:
    names = (*PREDICTORS, *(f"{OURS} - {name}" for name in PREDICTORS[1:]))
    body = {}
    for result in results:
        asked, values = result.cell.arguments, result.values
        for measure in MEASURES if "unseen" in asked else ():
            found = [values[measure][name] for name in names]
            label = f"{asked['log']}, unseen {asked['unseen']}, {values['returns']:,} returns: {measure}"
            body[label] = [Estimate(value, (low, high)) for value, low, high in found]
    said = (
        f"In brackets: 95 % intervals, {RESAMPLES:,} bootstrap samples of whole prompts. Of an unseen prompt the"
        " published tree says the mean of all others, whatever its tools returned. Such a mean is the lower, the longer"
        " the trajectories of the prompts that it lacks: that alone pulls its rank correlation below 0."
    )
    columns = [Column(name, "+.2f" if " - " in name else ".2f") for name in names]
    return Table("remaining tokens", tuple(columns), body, said)


def _makespan(runs: Runs) -> Table:
    columns = [Column(route, ",.1f", "s") for route in ROUTES]
    columns += [Column(f"{OURS} / {other}", ".3f", "x") for other in ROUTES[1:]]
    columns += [Column(f"mean of trajectories: / {other}", ".3f", "x") for other in ROUTES[1:]]
    body: dict[str, tuple[Value, ...]] = {
        case.name: (
            *(mean([it[route]["seconds"] for it in seeds]).value for route in ROUTES),
            *(ratio(seeds, OURS, other) for other in ROUTES[1:]),
            *(ratio(seeds, OURS, other, "mean") for other in ROUTES[1:]),
        )
        for case, seeds in runs.items()
    }
    plans = {case: [len(it["plan"]) for it in seeds] for case, seeds in runs.items()}
    buckets = "; ".join(f"{case.name} {', '.join(map(str, its))}" for case, its in plans.items())
    said = (
        f"512 trajectories at once, {len(next(iter(runs.values())))} seeds; ratios are paired, with 95 % intervals."
        " Routers know one half of the prompts and serve the other. A tool whose time was not recorded takes 1 s, and"
        f" so does a person, except where their waits are named. Buckets of the plans by seed: {buckets}."
    )
    return Table("seconds of the rollout", tuple(columns), body, said)


def _figure(runs: Runs) -> BarChart:
    series = [Bars(it, [ratio(seeds, it, LEAST_LOADED) for seeds in runs.values()]) for it in ROUTES[:-1]]
    series.append(Bars(LEAST_LOADED, (1.0,) * len(runs)))
    return BarChart(
        "Rollout of 512 trajectories of real agents: time by router",
        "Seconds from the first request to the last finish, as a multiple of those under the least-loaded router,"
        " simulated on 48 A800 planned with two buckets at most. Error bars: 95 % intervals of the ratio over seeds.",
        [case.name for case in runs],
        series,
        "time of the rollout, least-loaded = 1",
        decimals=2,
    )


EXPERIMENT = Experiment(
    "routing-real",
    "Routing on logs of real agents",
    "What do the tool returns of real agents say of the tokens to come, and what is routing by it worth?",
    _cells,
    _found,
    lacking,
)
