"""Worth of each part: added one by one as published, and taken from ours one at a time.

Invariant: published numbers are those of Libra (arXiv 2606.03077), and only stand beside ours. The links of the chain,
and ours with all its parts, are runs of `throughput`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.runs import QUICK, Parts, Runs, key, model_name, run_cell, with_searches, words_of
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.throughput import file_name
from benchmarks.rows import Row

MODEL = "Qwen/Qwen3-14B"
CHAIN_WORKLOADS = ("r2e_gym", "search_r1")
SEEDS = (0, 1, 2)
CHAIN = {  # system -> what it adds to the one before
    "even": "even split",
    "homogeneous": "+ homogeneous planner",
    "heterogeneous": "+ heterogeneous tp",
    "published-cmlfq": "+ C-MLFQ",
    "published": "+ elastic",
}
# Tokens/s of the chain on R2E-Gym.
PUBLISHED = {"even": 423, "homogeneous": 510, "heterogeneous": 551, "published-cmlfq": 666, "published": 763}
DIFFERENT: dict[str, Parts] = {
    "least-loaded routing": {"route": "least-loaded"},
    "one size by hand": {"most_buckets": 1},
    "up to four sizes by hand": {"most_buckets": 4},
    "four sizes by hand, published C-MLFQ": {"most_buckets": 4, "route": "cmlfq-published"},
    "four sizes by hand, least-loaded": {"most_buckets": 4, "route": "least-loaded"},
    "no replanning": {"replan": False},
    "KV stays": {"move_kv": False},
    "starts whatever caches hold": {"start_by_cache": False},
    "whole batches": {"early_gradients": False},
}
PARTS = {  # of `DIFFERENT`, by workload
    "search_r1": tuple(DIFFERENT),
    "r2e_gym": ("no replanning", "starts whatever caches hold"),
}
_QUICK_WITHOUT = ("least-loaded routing", "whole batches")
_PUBLISHED_ON = "r2e_gym"


def _cells(quick: bool) -> list[Cell]:
    if quick:
        setting = Setting(MODEL, "search_r1", **QUICK)
        return with_searches(_chain_cells([setting]) + _part_cells([setting], _QUICK_WITHOUT))
    own = [run_cell(setting, "ours") for setting in _settings(CHAIN_WORKLOADS)]
    chain = _chain_cells(_settings(CHAIN_WORKLOADS))
    parts = [cell for workload, names in PARTS.items() for cell in _part_cells(_settings([workload]), names)]
    return with_searches({cell.name: cell for cell in [*chain, *own, *parts]}.values())


def _settings(workloads: Iterable[str]) -> list[Setting]:
    return [Setting(MODEL, workload, seed=seed) for workload in workloads for seed in SEEDS]


def _chain_cells(settings: Sequence[Setting]) -> list[Cell]:
    return [run_cell(setting, system) for setting in settings for system in CHAIN]


def _part_cells(settings: Sequence[Setting], names: Iterable[str]) -> list[Cell]:
    return [
        run_cell(setting, "ours", parts) for setting in settings for parts in ({}, *(DIFFERENT[name] for name in names))
    ]


def _rows(results: Sequence[Result]) -> list[Row]:
    runs = Runs(results)
    rows = []
    for setting in _chains(runs):
        case = words_of(setting)
        for system, name in CHAIN.items():
            rows.append(Row(case, name, runs.mean(setting, system, "throughput").value, "tokens/s"))
        for before, (system, name) in zip(CHAIN, list(CHAIN.items())[1:], strict=False):
            gain = runs.ratio(key(setting, system), key(setting, before), "throughput").value
            rows.append(Row(case, f"{name}: over the one before", gain, "x"))
    for setting in runs.settings:
        case = words_of(setting)
        rows.append(Row(case, "ours", runs.mean(setting, "ours", "throughput").value, "tokens/s"))
        for name in _left_out(runs, setting):
            share = runs.ratio(key(setting, "ours", DIFFERENT[name]), key(setting, "ours"), "throughput")
            rows.append(Row(case, f"ours, {name}", share.value, "x of ours"))
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    chains = {f"chain-{file_name(setting)}": _chain(runs, setting) for setting in _chains(runs)}
    return chains | {f"parts-{file_name(setting)}": _parts(runs, setting) for setting in _whole(runs)}


def _chain(runs: Runs, setting: Setting) -> str:
    header = ["system", "tokens/s", "over the one before", "over the first"]
    header += ["published tokens/s", "published, over the first"] if setting.workload == _PUBLISHED_ON else []
    first, before = next(iter(CHAIN)), None
    body = []
    for system, name in CHAIN.items():
        row = [name, runs.mean(setting, system, "throughput").written(",.0f")]
        for other in (before, first if before else None):
            gain = None if other is None else runs.ratio(key(setting, system), key(setting, other), "throughput")
            row.append("" if gain is None else gain.written(".2f"))
        if setting.workload == _PUBLISHED_ON:
            row += [f"{PUBLISHED[system]}", f"{PUBLISHED[system] / PUBLISHED[first]:.2f}"]
        body.append(row)
        before = system
    return markdown_table(header, body)


def _parts(runs: Runs, setting: Setting) -> str:
    body = [["ours", runs.mean(setting, "ours", "throughput").written(",.0f"), ""]]
    for name in _left_out(runs, setting):
        parts = DIFFERENT[name]
        share = runs.ratio(key(setting, "ours", parts), key(setting, "ours"), "throughput")
        body.append([name, runs.mean(setting, "ours", "throughput", parts).written(",.0f"), share.written(".3f")])
    return markdown_table(["ours, but", "tokens/s", "of ours"], body)


def _figures(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    chains = {f"chain-{file_name(setting)}": _chain_figure(runs, setting) for setting in _chains(runs)}
    return chains | {f"parts-{file_name(setting)}": _parts_figure(runs, setting) for setting in _whole(runs)}


def _chain_figure(runs: Runs, setting: Setting) -> str:
    """Over the even split, so that published gains can stand beside ours."""
    first = next(iter(CHAIN))
    found = [runs.ratio(key(setting, system), key(setting, first), "throughput") for system in (*CHAIN, "ours")]
    bars = [Bars("simulated", tuple(one.value for one in found), tuple(one.ends for one in found))]
    if setting.workload == _PUBLISHED_ON:
        bars.append(Bars("published", (*(PUBLISHED[it] / PUBLISHED[first] for it in CHAIN), None), hollow=True, like=0))
    return grouped_bars(
        f"Parts added one by one: {setting.gpus} A800, {model_name(setting)}, {setting.workload}",
        "Throughput over that of the even split, with parts added one by one as published, and of ours (error bars:"
        " 95 % intervals over seeds).",
        [*CHAIN.values(), "ours"],
        bars,
        "throughput over that of the even split",
        decimals=2,
    )


def _parts_figure(runs: Runs, setting: Setting) -> str:
    names = _left_out(runs, setting)
    found = [runs.ratio(key(setting, "ours", DIFFERENT[it]), key(setting, "ours"), "throughput") for it in names]
    return grouped_bars(
        f"Ours without one part: {setting.gpus} A800, {model_name(setting)}, {setting.workload}",
        "Throughput of ours with one part left out or replaced, over that of ours with all its parts (error bars: 95 %"
        " intervals over seeds).",
        names,
        [Bars("simulated", tuple(one.value for one in found), tuple(one.ends for one in found))],
        "throughput over that of ours",
        decimals=2,
    )


def _chains(runs: Runs) -> list[Setting]:
    """Settings that the published chain ran in."""
    return [setting for setting in runs.settings if runs.has(setting, next(iter(CHAIN)))]


def _whole(runs: Runs) -> list[Setting]:
    """Settings that ours ran in without some of its parts, too."""
    return [setting for setting in runs.settings if _left_out(runs, setting)]


def _left_out(runs: Runs, setting: Setting) -> list[str]:
    return [name for name, parts in DIFFERENT.items() if runs.has(setting, "ours", parts)]


EXPERIMENT = Experiment(
    name="ablation",
    title="What each part is worth",
    question="How much faster is each system of the published chain than the one before, and ours without one part?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
