"""Gain that is left under other conditions: tools that tell less, other staleness, dearer role changes.

Invariant: one condition is changed at a time; the others are those of `throughput`, but for half as many steps over the
same drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.estimates import Estimate
from benchmarks.evaluation.experiment import Experiment, Found
from benchmarks.evaluation.figures import BarChart, Bars
from benchmarks.evaluation.runs import QUICK, Key, Parts, Runs, key, model_name, run_cell, with_searches
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.table import Column, Table
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

    @property
    def systems(self) -> dict[str, Key]:
        """Keys of the runs by system. The baseline changes no role, so the cost of role changes does not affect it."""
        return {
            "ours": key(self.setting, "ours", self.parts),
            "best static": key(self.setting, "static"),
            "ours, least-loaded": key(self.setting, "ours", {**BLIND, **self.parts}),
        }


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
                for setting, system, parts in condition.systems.values():
                    cell = run_cell(replace(setting, seed=seed), system, dict(parts))
                    found[cell.name] = cell
    return with_searches(found.values())


def _found(results: Sequence[Result]) -> Found:
    runs = Runs(results)
    usual = Setting(MODEL, WORKLOAD)
    size = next(it for it in runs.settings if (it.signal, it.staleness) == (usual.signal, usual.staleness))
    ran = {
        what: [it for it in varied if all(runs.has(*one[:2], dict(one[2])) for one in it.systems.values())]
        for what, varied in conditions(size).items()
    }
    return Found(
        {what: _table(runs, what, varied) for what, varied in ran.items()},
        {what: _figure(runs, what, varied) for what, varied in ran.items()},
    )


def _gains(runs: Runs, condition: Condition) -> dict[str, Estimate]:
    """Gain of our system over each of the others."""
    ours, *others = condition.systems.items()
    return {name: runs.ratio(ours[1], other, "throughput") for name, other in others}


def _table(runs: Runs, what: str, varied: Sequence[Condition]) -> Table:
    names = list(varied[0].systems)
    columns = [Column(f"{name}, tokens/s", ",.0f", "tokens/s") for name in names]
    columns += [Column(f"ours over {name}", ".2f", "x") for name in names[1:]]
    body = {}
    for condition in varied:
        found = [
            runs.mean(setting, system, "throughput", dict(parts))
            for setting, system, parts in condition.systems.values()
        ]
        body[condition.name] = (*found, *_gains(runs, condition).values())
    return Table(_WORDS[what], tuple(columns), body, case=what)


def _figure(runs: Runs, what: str, varied: Sequence[Condition]) -> BarChart:
    setting, gains = varied[0].setting, [_gains(runs, condition) for condition in varied]
    return BarChart(
        f"What ours gains: {setting.gpus} A800, {model_name(setting)}, {setting.workload}",
        f"Throughput of ours over that of another system, by {_WORDS[what]} (error bars: 95 % intervals over seeds).",
        [condition.name for condition in varied],
        [Bars(name, [gain[name] for gain in gains]) for name in gains[0]],
        "throughput of ours over that of",
        _WORDS[what],
        decimals=2,
    )


EXPERIMENT = Experiment(
    "sensitivity",
    "Under other conditions",
    "How much of the gain is left where tools tell less, staleness differs, or changing roles costs more?",
    _cells,
    _found,
)
