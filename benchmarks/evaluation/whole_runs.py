"""Cells of whole runs, one system in one setting, and of the choices that a run begins with, made once for all seeds
and lengths of a setting: baselines search, ours plans.

Invariant: a choice knows seed 0 and nothing of the runs that it is used in; that of ours knows what `libra plan` would.
All systems of a setting get the same trajectories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.evaluation import baselines, cells
from benchmarks.evaluation.baselines import HINDSIGHT_STEPS, Choice, at_most, choices, judged, judged_at_length
from benchmarks.evaluation.cells import Cell
from benchmarks.evaluation.setting import STEPS, Setting
from benchmarks.evaluation.systems import MAKERS, NAMES, ORACLE_BUCKETS, Parts, chosen_plan, oracle, ours
from libra.plan.plan import dump_plan, parse_plan
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.outcome import SimulatedRun
from libra.sim.training_run.system import System

FINALISTS = 3
_LONG = {"static": 3, "hindsight": 2}  # what is chosen in hindsight needs the choice of the other
_FIRST = 1e9  # cost: runs wait for choices, so these start before all runs
_DECIDING = ("early_gradients", "route")  # parts of ours that its first plan depends on


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
    where = replace(setting, seed=0, steps=HINDSIGHT_STEPS)
    arguments = {"setting": where.arguments(), "system": system}
    return Cell(name, search, arguments, where.files, cost=_FIRST * _LONG.get(system, 1))


def chosen(setting: Setting, system: str) -> Choice:
    """The kept choice of a baseline; searched and kept where there is none."""
    (result,) = cells.run([search_cell(setting, system, f"search {system}")], processes=1, progress=False)
    return Choice(**result.values["choice"])


def choose(setting: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """The chosen plan of ours, as its JSON."""
    return {"plan": json.loads(dump_plan(chosen_plan(Setting(**setting), Parts(**parts))))}


def choice_cell(setting: Setting, parts: Mapping[str, Any], name: str) -> Cell:
    """The same cell for all parts that do not affect the first plan."""
    where = replace(setting, seed=0, steps=STEPS)
    deciding = {what: value for what, value in parts.items() if what in _DECIDING}
    words = ", ".join([name, *(f"{what} {value}" for what, value in deciding.items())])
    return Cell(words, choose, {"setting": where.arguments(), "parts": deciding}, where.files, cost=2 * _FIRST)


def kept_ours(setting: Setting, parts: Mapping[str, Any] | None = None) -> System:
    """`ours`, whose first plan is chosen, and kept, where it is not kept yet."""
    asked = dict(parts or {})
    its = Parts(**asked)
    if its.most_buckets is not None:
        return ours(setting, its)
    (result,) = cells.run([choice_cell(setting, asked, "choice")], processes=1, progress=False)
    return ours(setting, its, parse_plan(json.dumps(result.values["plan"]), result.cell.name))


def run(setting: dict[str, Any], system: str, parts: dict[str, Any] | None = None) -> dict[str, Any]:
    """Outcome of the run. `parts` are those of ours, for an ablation. The plan that ours begins with, and what a
    baseline leaves open, are kept or chosen. Raises ValueError for a name not in `NAMES`, and for parts of another."""
    where = Setting(**setting)
    if system not in NAMES:
        raise ValueError(f"system is {system!r}; choose one of {', '.join(NAMES)}")
    if parts is not None and system != "ours":
        raise ValueError(f"system {system} has no parts; give them to ours")
    if system == "oracle":
        return _oracle(where)
    if system == "ours":
        what = kept_ours(where, parts)
    elif system in baselines.NAMES:
        what = baselines.system(where, system, chosen(where, system))
    else:
        what = MAKERS[system](where)
    return told(what, simulate_posttraining(what, where.episodes, where.steps))


def _oracle(setting: Setting) -> dict[str, Any]:
    """The best of what an oracle could do here, which it knows, too."""
    found = []
    for most_buckets in ORACLE_BUCKETS:
        what, episodes = oracle(setting, most_buckets)
        found.append(told(what, simulate_posttraining(what, episodes, setting.steps)))
    return max(found, key=lambda values: float(values["throughput"]))


def told(system: System, outcome: SimulatedRun) -> dict[str, Any]:
    """JSON values of a run: the sums, the plan that it began with, and columns of the steps."""
    steps = outcome.steps
    sums = ("throughput", "seconds", "trainer_share", "engine_share", "migrated_share", "interrupted")
    columns = ("ended", "waited", "training", "staleness", "training_devices")
    return {
        **{name: getattr(outcome, name) for name in sums},
        "generated": outcome.generated_tokens,
        "changes": len(outcome.changes),
        "worst_staleness": max(step.worst_staleness for step in steps),
        "plan": _words(system),
        **{name: [getattr(step, name) for step in steps] for name in columns},
        "tokens": [step.generated_tokens for step in steps],
        "contexts": [step.final_context_tokens for step in steps],
    }


def _words(system: System) -> str:
    plan = system.plan
    engines = " + ".join(
        f"{bucket.engines} {bucket.shape.rpartition('/')[2]} to {bucket.up_to}" for bucket in plan.allocation.buckets
    )
    assert plan.layout is not None
    most = system.request.recipe.concurrency
    limit = "" if most is None else f"; {most} trajectories at once"
    return f"{plan.layout.devices} train ({plan.layout.family}); {engines}{limit}"
