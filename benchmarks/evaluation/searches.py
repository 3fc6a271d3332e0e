"""Choices of the baselines, searched once for all seeds of a setting and kept.

Invariant: a search is a cell of its own. It knows seed 0 and nothing of the runs that its choice is used in.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from benchmarks.evaluation.baselines import HINDSIGHT_STEPS, Choice, at_most, choices, judged, judged_at_length
from benchmarks.evaluation.cells import Cell, run
from benchmarks.evaluation.setting import Setting

FINALISTS = 3
_LONG = {"static": 3, "hindsight": 2}  # what is chosen in hindsight needs the choice of the other
_FIRST = 1e9  # cost: runs wait for searches, so these start before all runs


def search(setting: dict[str, Any], system: str) -> dict[str, Any]:
    """The choice with the highest throughput. All are judged by a short simulation, but for those whose trainers alone
    are not expected to beat the best so far; then the best few, in hindsight with that of `static`, by a long one."""
    where = Setting(**setting)
    highest, left_out = 0.0, 0
    judgements: list[dict[str, Any]] = []
    for candidate in choices(where, system):
        if at_most(where, system, candidate) <= highest:
            left_out += 1
            continue
        throughput = judged(where, system, candidate)
        judgements.append(asdict(candidate) | {"throughput": throughput})
        highest = max(highest, throughput)
    judgements.sort(key=lambda it: -float(it["throughput"]))
    finalists = [Choice(it["training"], it["shape"], it["concurrency"]) for it in judgements[:FINALISTS]]
    if system == "hindsight":
        finalists.append(chosen(where, "static"))
    best = max(dict.fromkeys(finalists), key=lambda it: judged_at_length(where, system, it))
    return {"choice": asdict(best), "judged": judgements, "left_out": left_out}


def search_cell(setting: Setting, system: str, name: str) -> Cell:
    """Cell of a search: the same for all seeds and lengths of a run."""
    where = replace(setting, seed=0, steps=HINDSIGHT_STEPS, first=None)
    arguments = {"setting": where.arguments(), "system": system}
    return Cell(name, search, arguments, where.files, cost=_FIRST * _LONG.get(system, 1))


def chosen(setting: Setting, system: str) -> Choice:
    """The kept choice of a baseline; searched and kept where there is none."""
    (result,) = run([search_cell(setting, system, f"search {system}")], processes=1, progress=False)
    return Choice(**result.values["choice"])
