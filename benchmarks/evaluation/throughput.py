"""Throughput of every system on the same cluster: tokens per second over the whole drift.

Invariant: published numbers are those of Libra (arXiv 2606.03077), and only stand beside ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.estimates import Estimate
from benchmarks.evaluation.experiment import Column, Experiment, Found, Table, Value
from benchmarks.evaluation.figures import SYSTEMS, BarChart, Bars
from benchmarks.evaluation.runs import QUICK, Runs, file_name, key, model_name, run_cell, with_searches, words_of
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.systems import NAMES
from benchmarks.rows import Row, at_least, at_most

MODELS = ("Qwen/Qwen3-14B", "Qwen/Qwen3-30B-A3B")
WORKLOADS = ("search_r1", "dapo_math", "r2e_gym")
STEPS = {MODELS[0]: 60, MODELS[1]: 30}  # over the same drift
SEEDS = (0, 1, 2)
SECOND = ("colocated", "even", "static", "ours")  # systems of the second model; the others are run on the first
# Links of the published chain that are told apart where the ablation shows them only.
_LINKS, _LINKED = ("homogeneous", "heterogeneous", "published-cmlfq"), ("r2e_gym", "search_r1")
_QUICK_SYSTEMS = ("colocated", "even", "ours")
# Percent by which Libra generates more than (system, workload).
PUBLISHED = {
    ("colocated", "search_r1"): 300,
    ("colocated", "dapo_math"): 196,
    ("colocated", "r2e_gym"): 209,
    ("greedy", "search_r1"): 80,
    ("static", "search_r1"): 63,
    ("even", "r2e_gym"): 80,
}
GOALS = {"colocated": 3.0, "even": 1.8, "static": 1.6}  # of ours over it, on the workloads with a published number
ORACLE_GOAL = 1.10  # times the oracle's seconds
_COLUMNS = (
    Column("tokens/s", ",.0f", "tokens/s"),
    Column("trainer busy", ".0f", "%"),
    Column("engines busy", ".0f", "%"),
    Column("moved", ".0f", "%"),
    Column("ours over it", ".2f", "x"),
    Column("published ratio"),
)


def cells(quick: bool) -> list[Cell]:
    if quick:
        return with_searches(run_cell(Setting(MODELS[0], WORKLOADS[0], **QUICK), system) for system in _QUICK_SYSTEMS)
    return with_searches(
        run_cell(Setting(model, workload, steps=STEPS[model], seed=seed), system)
        for model in MODELS
        for workload in WORKLOADS
        for system in (NAMES if model == MODELS[0] else SECOND)
        if system not in _LINKS or workload in _LINKED
        for seed in SEEDS
    )


def _found(results: Sequence[Result]) -> Found:
    runs = Runs(results)
    by_model: dict[str, list[Setting]] = {}
    for setting in runs.settings:
        by_model.setdefault(model_name(setting), []).append(setting)
    return Found(
        {file_name(setting): _table(runs, setting) for setting in runs.settings} | {"choices": _choices(runs)},
        {model.lower(): _figure(runs, model, settings) for model, settings in by_model.items()},
        [row for setting in runs.settings for row in _goals(runs, setting)],
    )


def _table(runs: Runs, setting: Setting) -> Table:
    body: dict[str, Sequence[Value]] = {}
    for system in runs.systems(setting):
        gain, values = PUBLISHED.get((system, setting.workload)), runs.of(setting, system).values()
        shares = (
            100 * fmean(float(it[f"{what}_share"]) for it in values) for what in ("trainer", "engine", "migrated")
        )
        over = None if system == "ours" else _over(runs, setting, system, "throughput")
        published = "" if gain is None else f"{1 + gain / 100:.2f}"
        body[system] = (runs.mean(setting, system, "throughput"), *shares, over, published)
    return Table("system", _COLUMNS, body, case=words_of(setting))


def _over(runs: Runs, setting: Setting, system: str, what: str) -> Estimate:
    """The value of `ours` divided by the value of the other system."""
    return runs.ratio(key(setting, "ours"), key(setting, system), what)


def _goals(runs: Runs, setting: Setting) -> Iterator[Row]:
    case = words_of(setting)
    for system, least in GOALS.items():
        if system in runs.systems(setting) and (system, setting.workload) in PUBLISHED:
            yield at_least(case, f"ours over {system}", _over(runs, setting, system, "throughput").value, "x", least)
    if "oracle" in runs.systems(setting):
        behind = _over(runs, setting, "oracle", "seconds").value
        yield at_most(case, "time of ours over the oracle's", behind, "x", ORACLE_GOAL)


def _choices(runs: Runs) -> Table:
    """Table of the choices that the baselines' searches found."""
    body: dict[str, Sequence[Value]] = {}
    for name, values in runs.searched.items():
        choice, judged = values["choice"], len(values["judged"])
        limit = "as admitted" if choice["concurrency"] is None else f"{choice['concurrency']:,}"
        simulated = f"{judged} of {judged + values['left_out']}"
        shape = choice["shape"].rpartition("/")[2]
        body[name.removeprefix("search, ")] = (f"{choice['training']}", shape, limit, simulated)
    names = ("GPUs that train", "engines", "trajectories at once", "choices simulated")
    return Table("baseline", tuple(Column(name) for name in names), body)


def _figure(runs: Runs, model: str, settings: Sequence[Setting]) -> BarChart:
    bars = [
        Bars(system, [runs.mean(setting, system, "throughput") for setting in settings], like=SYSTEMS.index(system))
        for system in SYSTEMS
        if all(system in runs.systems(setting) for setting in settings)
    ]
    return BarChart(
        f"Throughput: {settings[0].gpus} A800, {model}",
        "Generated tokens that were trained on, per second of a simulated run over the whole drift, by workload and"
        " system (error bars: 95 % intervals of the mean over seeds).",
        [setting.workload for setting in settings],
        bars,
        "tokens per second",
    )


EXPERIMENT = Experiment(
    "throughput",
    "Throughput of whole systems",
    "How many tokens per second does each system train on with 48 A800, while lengths drift?",
    cells,
    _found,
)
