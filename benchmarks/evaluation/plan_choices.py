"""The plans that `ours` begins with, chosen once for all seeds of a setting and kept.

Invariant: a choice is a cell of its own. It knows what `libra plan` would: seed 0's log, and nothing of the runs that
begin with its plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.evaluation.cells import Cell, run
from benchmarks.evaluation.setting import STEPS, Setting
from benchmarks.evaluation.systems import Parts, chosen_plan, ours
from libra.plan.plan import dump_plan, parse_plan
from libra.sim.training_run.system import System

_FIRST = 2e9  # cost: runs wait for choices, so these start before all runs
_DECIDING = ("early_gradients", "route")  # parts that a choice depends on


def choose(setting: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """The chosen plan, as its JSON."""
    return {"plan": json.loads(dump_plan(chosen_plan(Setting(**setting), Parts(**parts))))}


def choice_cell(setting: Setting, parts: Mapping[str, Any], name: str) -> Cell:
    """Cell of a choice: the same for all seeds and lengths of a run, and parts that do not affect the first plan."""
    where = replace(setting, seed=0, steps=STEPS, first=None)
    deciding = {what: value for what, value in parts.items() if what in _DECIDING}
    words = ", ".join([name, *(f"{what} {value}" for what, value in deciding.items())])
    return Cell(words, choose, {"setting": where.arguments(), "parts": deciding}, where.files, cost=_FIRST)


def kept_ours(setting: Setting, parts: Mapping[str, Any] | None = None) -> System:
    """`ours`, whose first plan is chosen, and kept, where it is not kept yet."""
    asked = dict(parts or {})
    its = Parts(**asked)
    if its.most_buckets is not None:
        return ours(setting, its)
    (result,) = run([choice_cell(setting, asked, "choice")], processes=1, progress=False)
    return ours(setting, its, parse_plan(json.dumps(result.values["plan"]), result.cell.name))
