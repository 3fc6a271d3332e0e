"""What the baselines choose, searched once for all seeds of a setting and kept.

Invariant: a search is a cell of its own. It knows seed 0 and nothing of the runs that its choice is used in.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from benchmarks.evaluation.baselines import HINDSIGHT_STEPS, Choice, choices, judged
from benchmarks.evaluation.cells import Cell, run
from benchmarks.evaluation.setting import Setting

_FIRST = 1e9  # cost: runs wait for searches, so these start before all runs


def search(setting: dict[str, Any], system: str) -> dict[str, Any]:
    """The choice with the highest throughput, and that of each."""
    where = Setting(**setting)
    candidates = choices(where, system)
    throughputs = [judged(where, system, candidate) for candidate in candidates]
    best = max(range(len(candidates)), key=throughputs.__getitem__)
    judgements = [asdict(it) | {"throughput": found} for it, found in zip(candidates, throughputs, strict=True)]
    return {"choice": asdict(candidates[best]), "judged": judgements}


def search_cell(setting: Setting, system: str, name: str) -> Cell:
    """The same for all seeds and lengths of a run."""
    where = replace(setting, seed=0, steps=HINDSIGHT_STEPS)
    arguments = {"setting": where.arguments(), "system": system}
    return Cell(name, search, arguments, where.files, cost=_FIRST * (2 if system in ("static", "hindsight") else 1))


def chosen(setting: Setting, system: str) -> Choice:
    """As kept; searched, and kept, where it is not."""
    (result,) = run([search_cell(setting, system, f"search {system}")], processes=1, progress=False)
    return Choice(**result.values["choice"])
