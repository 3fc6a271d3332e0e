"""Whole runs: the cells of systems in settings, and their results by what was asked for.

Invariant: equal runs of two experiments are one cell, computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.evaluation import baselines, estimates
from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.estimates import Estimate
from benchmarks.evaluation.setting import STEPS, Setting
from benchmarks.evaluation.whole_runs import choice_cell, run, search, search_cell

Parts = Mapping[str, Any]  # of ours, those that differ
Values = Mapping[str, Any]
QUICK: Mapping[str, Any] = {"nodes": 2, "groups": 11, "steps": 12}  # of a setting, for a first look
Key = tuple[Setting, str, tuple[tuple[str, Any], ...]]

# CPU time of a run relative to a system that decides nothing during the run, roughly.
_DECIDING = {"ours": 8.0, "oracle": 4.0, "homogeneous": 1.5, "heterogeneous": 1.5, "published-cmlfq": 1.5}
_TURNS = {"search_r1": 1.0, "dapo_math": 0.6, "r2e_gym": 2.5}  # the same, by workload


def run_cell(setting: Setting, system: str, parts: Parts | None = None) -> Cell:
    """One run; `parts` are those of ours that differ."""
    changed = dict(parts or {})
    arguments: dict[str, Any] = {"setting": setting.arguments(), "system": system}
    words = ", ".join([words_of(setting), system, *(f"{what} {value}" for what, value in changed.items())])
    if changed:
        arguments["parts"] = changed
    cost = setting.steps * setting.nodes * _DECIDING.get(system, 1.0) * _TURNS.get(setting.workload, 1.0)
    return Cell(f"{words}, seed {setting.seed}", run, arguments, setting.files, cost)


def with_searches(runs: Iterable[Cell]) -> list[Cell]:
    """The runs, and before them the searches and choices that they need."""
    runs, found = list(runs), {}
    for cell in runs:
        system, setting = cell.arguments["system"], Setting(**cell.arguments["setting"])
        words, parts = words_of(replace(setting, steps=STEPS)), cell.arguments.get("parts", {})
        if system in baselines.NAMES:
            needed = search_cell(setting, system, f"search, {words}, {system}")
        elif system == "ours" and "most_buckets" not in parts:
            needed = choice_cell(setting, parts, f"choice, {words}")
        else:
            continue
        found[needed.name] = needed
    return [*found.values(), *runs]


def words_of(setting: Setting) -> str:
    """Name of a setting: its differences from the other settings of an experiment, except the seed."""
    usual = Setting(setting.model, setting.workload)
    words = [setting.workload, model_name(setting)]
    words += [f"staleness {setting.staleness}"] if setting.staleness != usual.staleness else []
    words += [f"{setting.steps} steps"] if setting.steps != usual.steps else []
    return ", ".join(words)


def model_name(setting: Setting) -> str:
    return setting.model.rpartition("/")[2]


def file_name(setting: Setting) -> str:
    """Name of a setting's tables and figures."""
    return f"{model_name(setting)}-{setting.workload}".lower().replace("_", "-")


class Runs:
    """Results of runs; those of searches are `searched`."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._found: dict[Key, dict[int, Values]] = {}
        self.searched: dict[str, Values] = {}  # by the name of the cell
        for result in results:
            asked = result.cell.arguments
            if result.cell.function is search:
                self.searched[result.cell.name] = result.values
            if result.cell.function is not run:
                continue
            setting = Setting(**asked["setting"])
            found = key(setting, asked["system"], asked.get("parts"))
            self._found.setdefault(found, {})[setting.seed] = result.values

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Each setting once, with seed 0, in the order of the results."""
        return tuple(dict.fromkeys(setting for setting, _, _ in self._found))

    def systems(self, setting: Setting) -> tuple[str, ...]:
        """Systems that ran in the setting with all their parts, in the order of the results."""
        return tuple(system for where, system, parts in self._found if where == setting and not parts)

    def has(self, setting: Setting, system: str, parts: Parts | None = None) -> bool:
        return key(setting, system, parts) in self._found

    def of(self, setting: Setting, system: str, parts: Parts | None = None) -> Mapping[int, Values]:
        """Values by seed. Raises KeyError for what did not run."""
        return self._found[key(setting, system, parts)]

    def mean(self, setting: Setting, system: str, what: str, parts: Parts | None = None) -> Estimate:
        """Mean of one of the values, over the seeds."""
        return estimates.mean([float(values[what]) for values in self.of(setting, system, parts).values()])

    def ratio(self, above: Key, below: Key, what: str) -> Estimate:
        """Ratio of one of the values, paired by seed."""
        over, under = self.of(above[0], above[1], dict(above[2])), self.of(below[0], below[1], dict(below[2]))
        if over.keys() != under.keys():
            raise ValueError(f"{above[1]} ran with seeds {sorted(over)}, {below[1]} with {sorted(under)}; pair them")
        return estimates.ratio([float(over[seed][what]) for seed in over], [float(under[seed][what]) for seed in over])


def key(setting: Setting, system: str, parts: Parts | None = None) -> Key:
    """Key of results: all seeds of a setting have the same."""
    return replace(setting, seed=0), system, tuple(sorted((parts or {}).items()))
