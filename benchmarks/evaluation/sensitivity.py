"""Gain that is left under other conditions: tools that tell less, other staleness, dearer role changes.

Invariant: one condition is changed at a time; the others are those of `throughput`, but for half as many steps over the
same drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.estimate import Estimate
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.figures import Bars, grouped_bars
from benchmarks.evaluation.page import markdown_table
from benchmarks.evaluation.runs import QUICK, Key, Parts, Runs, key, model_name, run_cell, with_searches
from benchmarks.evaluation.setting import Setting
from benchmarks.rows import Row
from benchmarks.workloads.definition import SIGNALS

MODEL, WORKLOAD = "Qwen/Qwen3-14B", "search_r1"
SEEDS = (0, 1, 2)
STEPS = 30
_QUICK_NAMES = ("strong", "0", "1", "x1", "x4")
BLIND: Parts = {"route": "least-loaded"}


@dataclass(frozen=True, slots=True)
class Condition:
    """One value of a condition that is varied."""

    name: str
    setting: Setting  # of seed 0
    parts: Parts = field(default_factory=dict)  # of ours

    def systems(self) -> dict[str, Key]:
        """Keys of the runs by system. The baseline changes no role, so the cost of role changes does not affect it."""
        return {
            "ours": key(self.setting, "ours", self.parts),
            "best static": key(self.setting, "static"),
            "ours, least-loaded": key(self.setting, "ours", {**BLIND, **self.parts}),
        }

    def runs(self) -> list[Key]:
        return list(self.systems().values())


def conditions(size: Setting) -> dict[str, list[Condition]]:
    """Values of each condition that is varied, in their order; `size` is the setting that is varied."""
    return {
        "signal": [Condition(name, replace(size, signal=name)) for name in SIGNALS],
        "staleness": [Condition(str(versions), replace(size, staleness=versions)) for versions in (0, 1, 4, 8)],
        "switching": [
            Condition(f"x{factor:g}", size, {} if factor == 1 else {"switch": factor}) for factor in (1.0, 4.0)
        ],
    }


_WORDS = {
    "signal": "how much tool returns tell",
    "staleness": "staleness, versions",
    "switching": "seconds of role changes, times the published ones",
}


def _cells(quick: bool) -> list[Cell]:
    size = Setting(MODEL, WORKLOAD, **({**QUICK, "steps": 6} if quick else {"steps": STEPS}))
    found = {}
    for varied in conditions(size).values():
        for condition in [it for it in varied if it.name in _QUICK_NAMES] if quick else varied:
            for seed in SEEDS[:1] if quick else SEEDS:
                for setting, system, parts in condition.runs():
                    cell = run_cell(replace(setting, seed=seed), system, dict(parts))
                    found[cell.name] = cell
    return with_searches(found.values())


def _ran(runs: Runs) -> dict[str, list[Condition]]:
    """The conditions that there are results of."""
    usual = Setting(MODEL, WORKLOAD)
    same = [it for it in runs.settings if (it.signal, it.staleness) == (usual.signal, usual.staleness)]
    return {
        what: [it for it in varied if all(runs.has(one, system, dict(parts)) for one, system, parts in it.runs())]
        for what, varied in conditions(same[0]).items()
    }


def _gains(runs: Runs, condition: Condition) -> dict[str, Estimate]:
    """Gain of our system over each of the others."""
    ours, *others = condition.systems().items()
    return {name: runs.ratio(ours[1], other, "throughput") for name, other in others}


def _rows(results: Sequence[Result]) -> list[Row]:
    runs = Runs(results)
    rows = []
    for what, varied in _ran(runs).items():
        for condition in varied:
            case = f"{what} {condition.name}"
            for name, (setting, system, parts) in condition.systems().items():
                value = runs.mean(setting, system, "throughput", dict(parts)).value
                rows.append(Row(case, name, value, "tokens/s"))
            rows += [Row(case, f"ours over {name}", one.value, "x") for name, one in _gains(runs, condition).items()]
    return rows


def _tables(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    return {what: _table(runs, what, varied) for what, varied in _ran(runs).items()}


def _table(runs: Runs, what: str, varied: Sequence[Condition]) -> str:
    names = list(varied[0].systems())
    header = [_WORDS[what], *(f"{name}, tokens/s" for name in names), *(f"ours over {name}" for name in names[1:])]
    body = []
    for condition in varied:
        found = [
            runs.mean(setting, system, "throughput", dict(parts)).written(",.0f")
            for setting, system, parts in condition.runs()
        ]
        body.append([condition.name, *found, *(one.written(".2f") for one in _gains(runs, condition).values())])
    return markdown_table(header, body)


def _figures(results: Sequence[Result]) -> dict[str, str]:
    runs = Runs(results)
    return {what: _figure(runs, what, varied) for what, varied in _ran(runs).items()}


def _figure(runs: Runs, what: str, varied: Sequence[Condition]) -> str:
    setting = varied[0].setting
    gains = [_gains(runs, condition) for condition in varied]
    bars = []
    for number, name in enumerate(gains[0]):
        found = [gain[name] for gain in gains]
        bars.append(Bars(name, tuple(one.value for one in found), tuple(one.ends for one in found), like=number))
    return grouped_bars(
        f"What ours gains: {setting.gpus} A800, {model_name(setting)}, {setting.workload}",
        f"Throughput of ours over that of another system, by {_WORDS[what]} (error bars: 95 % intervals over seeds).",
        [condition.name for condition in varied],
        bars,
        "throughput of ours over that of",
        _WORDS[what],
        decimals=2,
    )


EXPERIMENT = Experiment(
    name="sensitivity",
    title="Under other conditions",
    question="How much of the gain is left where tools tell less, staleness differs, or changing roles costs more?",
    cells=_cells,
    rows=_rows,
    tables=_tables,
    figures=_figures,
)
