"""Feasibility of a problem: a minimal set of named constraints that conflict, if no plan exists.

Invariant: `conflict` is empty exactly when a plan exists that may leave devices idle. Otherwise no plan satisfies all
its constraints together, but without any single one of them a plan exists. A deletion filter finds this set: it drops
one constraint after another, and keeps each constraint without which a plan exists (Chinneck and Dravnieks 1991,
Locating minimal infeasible constraint sets in linear programs).

Families are those of `libra.plan.problem`. Numbers of buckets and seconds never conflict, since one engine that holds
the longest context can serve all work in enough time. The solvers determine whether a plan leaves no device idle.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from libra.plan.problem import EngineOption, Family, InfeasiblePlanError, Problem, TrainingOption

_REMEDIES: Mapping[Family, str] = {  # for a constraint that conflicts by itself
    "one_training": "add devices, or lower the memory that training needs",
    "every_class_once": "add devices with more memory",
    "longest_context": "lower the longest context, or add devices or shapes with more memory",
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of the problem: its family, its text, and its pool if it concerns one pool."""

    family: Family
    text: str
    pool: str | None = None


def require_feasible(problem: Problem) -> None:
    """Raise `InfeasiblePlanError` naming the conflict, unless a plan exists that may leave devices idle."""
    conflicting = conflict(problem)
    if not conflicting:
        return
    stated = "; ".join(constraint.text for constraint in conflicting)
    if len(conflicting) == 1:
        raise _infeasible(problem, f"{stated}: {_REMEDIES.get(conflicting[0].family, 'add devices')}")
    shared = "" if problem.colocated or problem.use_all_devices else ", or share devices (mode: colocated)"
    raise _infeasible(
        problem,
        f"these constraints conflict, and dropping any one of them would allow a plan: {stated}: add devices, "
        f"reduce the request{shared}",
    )


def all_devices_conflict(problem: Problem) -> InfeasiblePlanError:
    """The error for problems in which every plan leaves a device idle, although all must be used."""
    return _infeasible(
        problem,
        "use_all_devices leaves no plan: no training option and engines together use exactly the devices of every pool;"
        " allow idle devices, or add smaller engine shapes or training options",
    )


def _infeasible(problem: Problem, conflict: str) -> InfeasiblePlanError:
    """The error, with the options that are missing from the menu."""
    return InfeasiblePlanError("; ".join(words for words in (conflict, problem.restriction) if words))


def conflict(problem: Problem) -> tuple[Constraint, ...]:
    """A minimal set of constraints that conflict; empty if there is a plan."""
    needed = constraints(problem)
    if has_plan(problem, needed):
        return ()
    # Earlier constraints are dropped first. Pools come first, so that a pool that is large enough is not named.
    for constraint in needed:
        others = tuple(other for other in needed if other != constraint)
        if not has_plan(problem, others):
            needed = others
    return needed


def constraints(problem: Problem) -> tuple[Constraint, ...]:
    """Every constraint that could be part of a conflict. Without any training option or any engine, only the constraint
    that needs it.
    """
    if not problem.training:
        return (Constraint("one_training", "a layout must train the model, but none fits any pool"),)
    if not problem.engines:
        return (Constraint("every_class_once", "an engine must hold the model, but none fits any pool"),)
    pools = (
        Constraint("devices", f"pool {pool.name} has {_devices(pool.devices)}", pool.name) for pool in problem.pools
    )
    own = (Constraint("own_devices", "training and generation have separate devices"),)
    return (*pools, *(() if problem.colocated else own), _training(problem), _longest_context(problem))


def has_plan(problem: Problem, kept: Collection[Constraint]) -> bool:
    """Whether a plan satisfies the constraints in `kept`; idle devices are allowed."""
    if not problem.training or not problem.engines:
        return not kept
    families = {constraint.family for constraint in kept}
    limits = {constraint.pool: problem.pool(constraint.pool).devices for constraint in kept if constraint.pool}
    training: list[TrainingOption | None] = [*problem.training] if "one_training" in families else [None]
    needed = problem.longest_context if "longest_context" in families else 0
    engines = [option for option in problem.engines if option.holds >= needed]
    return any(_fit(limits, train, engine, "own_devices" in families) for train, engine in product(training, engines))


def smallest(problem: Problem) -> tuple[TrainingOption, EngineOption] | None:
    """The training option and the engine for the longest context that need the fewest devices together; None: no pair
    fits.
    """
    limits = {pool.name: pool.devices for pool in problem.pools}
    own = not problem.colocated
    engines = [option for option in problem.engines if option.holds >= problem.longest_context]
    fitting = [pair for pair in product(problem.training, engines) if _fit(limits, *pair, own)]
    return min(fitting, key=lambda pair: (pair[0].devices, sum(pair[1].uses.values())), default=None)


def _training(problem: Problem) -> Constraint:
    least = (
        min((option for option in problem.training if option.pool == pool.name), key=lambda option: option.devices)
        for pool in problem.pools
        if any(option.pool == pool.name for option in problem.training)
    )
    stated = " or ".join(f"{_devices(option.devices)} of {option.pool} ({option.layout})" for option in least)
    return Constraint("one_training", f"training needs at least {stated}")


def _longest_context(problem: Problem) -> Constraint:
    longest = problem.longest_context
    text = f"an engine must hold the longest context of {longest:,} tokens"
    holding = [option for option in problem.engines if option.holds >= longest]
    if holding:
        least, devices = min(((it, sum(it.uses.values())) for it in holding), key=lambda pair: pair[1])
        return Constraint("longest_context", f"{text} ({least.shape} does, with {_devices(devices)})")
    most = max(problem.engines, key=lambda option: option.holds)
    return Constraint("longest_context", f"{text} (the longest that fits is {most.holds:,}, on {most.shape})")


def _devices(number: int) -> str:
    return f"{number:,} device{'' if number == 1 else 's'}"


def _fit(limits: Mapping[str, int], train: TrainingOption | None, engine: EngineOption, own: bool) -> bool:
    used = engine.uses
    if train is not None:
        there = used.get(train.pool, 0)
        used[train.pool] = there + train.devices if own else max(there, train.devices)
    return all(devices <= limits.get(pool, devices) for pool, devices in used.items())


def ample_step(problem: Problem) -> float:
    """Seconds of a step that is long enough for every plan: twice the time in which any training option trains and one
    engine of any option serves all trajectories.
    """
    train = max(option.seconds + option.publish for option in problem.training) + 2 * problem.switch
    generate = max(
        option.stall + max(sum(row) for row in option.work) + sum(option.refill) + math.sqrt(sum(option.refresh))
        for option in problem.engines
    )
    # A trajectory may stay on any two engines, one after the other.
    classes = range(len(problem.peaks))
    longest = max(max(*option.residence, *map(option.stays.alone, classes)) for option in problem.engines)
    return 2 * (train + generate + 2 * longest)
