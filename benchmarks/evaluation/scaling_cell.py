"""One system on a cluster of some size, with the CPU time that deciding and simulating take.

Invariant: seconds of CPU are those of this process, all its threads together; what is decided does not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from benchmarks.evaluation import baselines
from benchmarks.evaluation.baselines import Choice
from benchmarks.evaluation.plan_choices import kept_ours
from benchmarks.evaluation.posttraining_cell import told
from benchmarks.evaluation.searches import chosen
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.systems import Parts, made
from libra.sim.training_run.loop import simulate_posttraining

T = TypeVar("T")


def scale(setting: dict[str, Any], system: str) -> dict[str, Any]:
    """Outcome of a run, and CPU seconds: `planning` of one plan, and `simulating` of the run with all decisions in it.
    A baseline's search is a cell of its own, and so is the choice of the plan that ours begins with."""
    where = Setting(**setting)
    planner = where.planner(**Parts().recipe)
    tracker = where.tracker(planner)  # episodes and profiles are read before the clock starts
    _, planning = _clocked(lambda: planner.plan(tracker))
    choice: Choice | None = chosen(where, system) if system in baselines.NAMES else None
    what, episodes = (kept_ours(where), where.episodes) if system == "ours" else made(where, system, choice)
    outcome, simulating = _clocked(lambda: simulate_posttraining(what, episodes, where.run_steps))
    found = told(what, outcome)
    found |= {"planning": planning, "simulating": simulating}
    return found | {"choice": None if choice is None else asdict(choice)}


def _clocked(call: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    result = call()
    return result, time.process_time() - began
