"""Throughput of every system on the same cluster: tokens per second over the whole drift.

Invariant: published numbers are those of Libra (arXiv 2606.03077), and only stand beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.palette import SYSTEMS, number_of
from benchmarks.evaluation.runs import QUICK, Runs, key, model_name, run_cell, with_searches, words_of
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.systems import NAMES
from benchmarks.rows import Row

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


def _rows(results: Sequence[Result]) -> list[Row]:
    runs = Runs(results)
    rows = []
    for setting in runs.settings:
        case = words_of(setting)
        for system in runs.systems(setting):
            rows.append(Row(case, system, runs.mean(setting, system, "throughput").value, "tokens/s"))
            for what, share in (("trainer", "trainer_share"), ("engines", "engine_share")):
                rows.append(Row(case, f"{system}: {what} busy", _percent(runs, setting, system, share), "%"))
            moved = _percent(runs, setting, system, "migrated_share")
            rows.append(Row(case, f"{system}: moved", moved, "% of trained context"))
        for system in runs.systems(setting):
            if system != "ours":
                rows.append(_compared(runs, setting, system))
        if "oracle" in runs.systems(setting):
            behind = runs.ratio(key(setting, "ours"), key(setting, "oracle"), "seconds").value
            goal = f"at most {ORACLE_GOAL:.2f} x"
            rows.append(Row(case, "time of ours over the oracle's", behind, "x", goal, behind <= ORACLE_GOAL))
    return rows


def _compared(runs: Runs, setting: Setting, system: str) -> Row:
    case, metric = words_of(setting), f"ours over {system}"
    found = runs.ratio(key(setting, "ours"), key(setting, system), "throughput").value
    if system not in GOALS or (system, setting.workload) not in PUBLISHED:
        return Row(case, metric, found, "x")
    return Row(case, metric, found, "x", f"at least {GOALS[system]:.1f} x", found >= GOALS[system])


def _tables(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    return {file_name(setting): _table(runs, setting) for setting in runs.settings} | {"choices": _choices(runs)}


def _table(runs: Runs, setting: Setting) -> str:
    header = ["system", "tokens/s", "trainer busy", "engines busy", "moved", "ours over it", "published ratio"]
    body = []
    for system in runs.systems(setting):
        gain = PUBLISHED.get((system, setting.workload))
        over = runs.ratio(key(setting, "ours"), key(setting, system), "throughput")
        body.append(
            [
                system,
                runs.mean(setting, system, "throughput").written(",.0f"),
                f"{_percent(runs, setting, system, 'trainer_share'):.0f} %",
                f"{_percent(runs, setting, system, 'engine_share'):.0f} %",
                f"{_percent(runs, setting, system, 'migrated_share'):.0f} %",
                "" if system == "ours" else over.written(".2f"),
                "" if gain is None else f"{1 + gain / 100:.2f}",
            ]
        )
    return markdown_table(header, body)


def _choices(runs: Runs) -> str:
    """Table of the choices that the baselines' searches found."""
    body = []
    for name, values in runs.searched.items():
        choice = values["choice"]
        limit = "as admitted" if choice["concurrency"] is None else f"{choice['concurrency']:,}"
        found = [
            f"{choice['training']}",
            choice["shape"].rpartition("/")[2],
            limit,
            f"{len(values['judged'])} of {len(values['judged']) + values['left_out']}",
        ]
        body.append([name.removeprefix("search, "), *found])
    return markdown_table(["baseline", "GPUs that train", "engines", "trajectories at once", "choices simulated"], body)


def _figures(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    by_model: dict[str, list[Setting]] = {}
    for setting in runs.settings:
        by_model.setdefault(model_name(setting), []).append(setting)
    return {model.lower(): _figure(runs, model, settings) for model, settings in by_model.items()}


def _figure(runs: Runs, model: str, settings: Sequence[Setting]) -> str:
    bars = []
    for system in SYSTEMS:
        if all(system in runs.systems(setting) for setting in settings):
            found = [runs.mean(setting, system, "throughput") for setting in settings]
            # A wide interval of few seeds may end below 0, which no throughput is.
            ends = tuple(None if one.ends is None else (max(one.ends[0], 0.0), one.ends[1]) for one in found)
            bars.append(Bars(system, tuple(one.value for one in found), ends, like=number_of(system)))
    return grouped_bars(
        f"Throughput: {settings[0].gpus} A800, {model}",
        "Generated tokens that were trained on, per second of a simulated run over the whole drift, by workload and"
        " system (error bars: 95 % intervals of the mean over seeds).",
        [setting.workload for setting in settings],
        bars,
        "tokens per second",
    )


def file_name(setting: Setting) -> str:
    return f"{model_name(setting)}-{setting.workload}".lower().replace("_", "-")


def _percent(runs: Runs, setting: Setting, system: str, share: str) -> float:
    return 100 * fmean(float(values[share]) for values in runs.of(setting, system).values())


EXPERIMENT = Experiment(
    name="throughput",
    title="Throughput of whole systems",
    question="On 48 A800: how many tokens per second does each system train on, while lengths drift?",
    cells=cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
