"""Whether a problem has any plan at all.

Invariant: a plan exists exactly when some training option leaves room for one engine that holds the longest context:
given time, that engine serves everything. Only where no device may idle is more asked: a step of `ample_step` seconds
leaves time for everything, so what cannot be done within it cannot be done.
"""

from __future__ import annotations

import math

from libra.plan.problem import EngineOption, InfeasiblePlanError, Problem, TrainingOption


def require_feasible(problem: Problem) -> None:
    """Raise `InfeasiblePlanError` naming what conflicts, unless a plan exists."""
    if not problem.training:
        raise InfeasiblePlanError("nothing can train: there is no training option on any pool")
    if not problem.engines:
        raise InfeasiblePlanError("nothing can generate: there is no engine option on any pool")
    longest = problem.longest_context
    holding = [option for option in problem.engines if option.holds >= longest]
    if not holding:
        best = max(problem.engines, key=lambda option: option.holds)
        raise InfeasiblePlanError(
            f"no engine shape holds the longest context of {longest} tokens; the largest, {best.shape}, holds"
            f" {best.holds}: lower the longest context, or add devices or shapes with more memory"
        )
    if not any(_both(problem, training, engine) for training in problem.training for engine in holding):
        training = min(problem.training, key=lambda option: option.devices)
        engine = min(holding, key=lambda option: option.devices)
        pools = ", ".join(f"{pool.name} has {pool.devices}" for pool in problem.pools)
        raise InfeasiblePlanError(
            f"training ({training.layout}, {training.devices} devices of {training.pool} at least) and one engine for "
            f"{longest} tokens ({engine.shape}, {engine.devices} devices of {engine.pool}) do not fit together: "
            f"{pools}; add devices"
        )


def ample_step(problem: Problem) -> float:
    """Seconds in which any training option trains and one engine of any option serves all, and as many to spare."""
    train = max(option.seconds + option.publish for option in problem.training) + 2 * problem.switch
    generate = max(
        (option.stall + max(sum(row) for row in option.work) + sum(option.refill) + math.sqrt(sum(option.refresh)))
        / option.busy
        + option.alone
        + max(option.residence)
        for option in problem.engines
    )
    return 2 * (train + generate)


def all_devices_conflict() -> InfeasiblePlanError:
    """What to raise when plans exist, but each leaves a device idle that may not."""
    return InfeasiblePlanError(
        "use_all_devices leaves no plan: no training option and engines together use exactly the devices of every pool;"
        " allow idle devices, or add smaller engine shapes or training options"
    )


def _both(problem: Problem, training: TrainingOption, engine: EngineOption) -> bool:
    shared = training.pool == engine.pool and not problem.colocated
    return (
        training.devices + (engine.devices if shared else 0) <= problem.pool(training.pool).devices
        and engine.devices <= problem.pool(engine.pool).devices
    )
