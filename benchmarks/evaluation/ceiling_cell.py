"""A cell of `ceiling`: the throughput that the planner's own prices allow if no GPU ever waits.

Invariant: prices of training and of generating are those that the planner uses. Waiting for the longest trajectory and
sending weights cost nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.evaluation.setting import Setting
from libra.plan.problem import Problem
from libra.trajectory import Trajectory

_VERSIONS = 10  # of the policy, over the drift


@dataclass(frozen=True, slots=True)
class Balance:
    """GPUs that train and generate, so that both sides take as long as each other, as nearly as GPUs can be divided."""

    seconds: float  # of a step
    training_devices: int
    shape: str  # of the engines


def ceiling(setting: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second over the drift, with the best split and engines for each version of the policy."""
    where = Setting(**setting)
    planner = where.planner(early_gradients=True)
    prompts = planner.recipe.prompts
    seconds = tokens = 0.0
    versions = []
    for number in range(_VERSIONS):
        version = round((number + 0.5) * where.steps / _VERSIONS)
        batch = _batch(where, version, prompts)
        tracker = planner.tracker()
        for trajectory in batch:
            tracker.observe(trajectory)
        best = balance(planner.request(tracker).menu().problem)
        generated = sum(trajectory.generated_tokens for trajectory in batch)
        seconds, tokens = seconds + best.seconds, tokens + generated
        versions.append([version, best.seconds, generated / best.seconds, best.training_devices, best.shape])
    return {"throughput": tokens / seconds, "versions": versions}


def balance(problem: Problem) -> Balance:
    """The best balance of a problem with one pool of devices. Raises ValueError for more pools."""
    (pool,) = problem.pools
    found = []
    for training in problem.training:
        for option in problem.engines:
            engines = (pool.devices - training.devices) // option.devices
            if engines:
                work = max(sum(row) for row in option.work) / engines
                found.append(Balance(max(training.seconds, work), training.devices, option.shape))
    return min(found, key=lambda it: it.seconds)


def _batch(setting: Setting, version: int, prompts: int) -> list[Trajectory]:
    groups = (setting.episodes.group(version * prompts + number, version) for number in range(prompts))
    return [trajectory for group in groups for trajectory in group]
