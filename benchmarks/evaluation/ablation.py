"""Worth of each part: added one by one as published, and taken from ours one at a time.

Invariant: published numbers are those of Libra (arXiv 2606.03077), and only stand beside ours. The links of the chain,
and ours with all its parts, are runs of `throughput`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.experiment import Column, Experiment, Found, Table, Value
from benchmarks.evaluation.figures import BarChart, Bars
from benchmarks.evaluation.runs import QUICK, Parts, Runs, file_name, key, model_name, run_cell, with_searches, words_of
from benchmarks.evaluation.setting import Setting

MODEL = "Qwen/Qwen3-14B"
CHAIN_WORKLOADS = ("r2e_gym", "search_r1")
SEEDS = (0, 1, 2)
FIRST = "even"
CHAIN = {  # system -> what it adds to the one before
    FIRST: "even split",
    "homogeneous": "+ homogeneous planner",
    "heterogeneous": "+ heterogeneous tp",
    "published-cmlfq": "+ C-MLFQ",
    "published": "+ elastic",
}
# Tokens/s of the chain on R2E-Gym.
PUBLISHED = {FIRST: 423, "homogeneous": 510, "heterogeneous": 551, "published-cmlfq": 666, "published": 763}
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
_INTERVALS = "(error bars: 95 % intervals over seeds)"


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


def _found(results: Sequence[Result]) -> Found:
    runs = Runs(results)
    chains = {f"chain-{file_name(setting)}": setting for setting in runs.settings if runs.has(setting, FIRST)}
    parts = {f"parts-{file_name(setting)}": setting for setting in runs.settings if _without(runs, setting)}
    return Found(
        {name: _chain(runs, setting) for name, setting in chains.items()}
        | {name: _parts(runs, setting) for name, setting in parts.items()},
        {name: _chain_figure(runs, setting) for name, setting in chains.items()}
        | {name: _parts_figure(runs, setting) for name, setting in parts.items()},
    )


def _chain(runs: Runs, setting: Setting) -> Table:
    published = setting.workload == _PUBLISHED_ON
    columns = [Column("tokens/s", ",.0f", "tokens/s"), Column("over the one before", ".2f", "x")]
    columns += [Column("over the first", ".2f", "x")]
    columns += [Column("published tokens/s"), Column("published, over the first")] if published else []
    body: dict[str, Sequence[Value]] = {}
    before = None
    for system, name in CHAIN.items():
        gains = [
            None if before is None else runs.ratio(key(setting, system), key(setting, other), "throughput")
            for other in (before or FIRST, FIRST)
        ]
        theirs = (f"{PUBLISHED[system]}", f"{PUBLISHED[system] / PUBLISHED[FIRST]:.2f}") if published else ()
        body[name] = (runs.mean(setting, system, "throughput"), *gains, *theirs)
        before = system
    return Table("system", tuple(columns), body, case=words_of(setting))


def _parts(runs: Runs, setting: Setting) -> Table:
    body: dict[str, Sequence[Value]] = {"ours": (runs.mean(setting, "ours", "throughput"), None)}
    for name, parts in _without(runs, setting).items():
        share = runs.ratio(key(setting, "ours", parts), key(setting, "ours"), "throughput")
        body[name] = (runs.mean(setting, "ours", "throughput", parts), share)
    columns = (Column("tokens/s", ",.0f", "tokens/s"), Column("of ours", ".3f", "x"))
    return Table("ours, but", columns, body, case=f"{words_of(setting)}, one part otherwise")


def _chain_figure(runs: Runs, setting: Setting) -> BarChart:
    """Over the even split, so that published gains can stand beside ours."""
    found = [runs.ratio(key(setting, it), key(setting, FIRST), "throughput") for it in (*CHAIN, "ours")]
    bars = [Bars("simulated", found)]
    if setting.workload == _PUBLISHED_ON:
        theirs = [*(PUBLISHED[system] / PUBLISHED[FIRST] for system in CHAIN), None]
        bars.append(Bars("published", theirs, hollow=True, like=0))
    return BarChart(
        f"Parts added one by one: {setting.gpus} A800, {model_name(setting)}, {setting.workload}",
        f"Throughput over that of the even split, with parts added one by one as published, and of ours {_INTERVALS}.",
        [*CHAIN.values(), "ours"],
        bars,
        "throughput over that of the even split",
        decimals=2,
    )


def _parts_figure(runs: Runs, setting: Setting) -> BarChart:
    without = _without(runs, setting)
    found = [runs.ratio(key(setting, "ours", it), key(setting, "ours"), "throughput") for it in without.values()]
    return BarChart(
        f"Ours without one part: {setting.gpus} A800, {model_name(setting)}, {setting.workload}",
        f"Throughput of ours with one part left out or replaced, over that of ours with all its parts {_INTERVALS}.",
        list(without),
        [Bars("simulated", found)],
        "throughput over that of ours",
        decimals=2,
    )


def _without(runs: Runs, setting: Setting) -> dict[str, Parts]:
    """Parts that ours ran without, or with others, in the setting."""
    return {name: parts for name, parts in DIFFERENT.items() if runs.has(setting, "ours", parts)}


EXPERIMENT = Experiment(
    "ablation",
    "What each part is worth",
    "How much faster is each system of the published chain than the one before it, and ours without a part?",
    _cells,
    _found,
)
