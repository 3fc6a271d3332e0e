"""Why a problem has no plan: named constraints that conflict, none of which could be left out.

Invariant: `conflict` is empty exactly when a plan exists. Otherwise all its constraints together admit no plan, and
leaving out any one of them admits one. It is found by a deletion filter (Chinneck and Dravnieks 1991, Locating minimal
infeasible constraint sets in linear programs): drop one constraint after the other, and keep those that turn out to be
needed.

Families are those of `libra.plan.problem`. Numbers of buckets and seconds never conflict: given time, one engine that
holds the longest context serves everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from libra.plan.model.solve import solve
from libra.plan.problem import EngineOption, Family, InfeasiblePlanError, Problem, TrainingOption


@dataclass(frozen=True, slots=True)
class Constraint:
    """Something that the problem demands: of which family, of which pool (where it is one pool's), and in words."""

    family: Family
    text: str
    pool: str | None = None


def conflict(problem: Problem) -> tuple[Constraint, ...]:
    """A minimal set of constraints that conflict; empty where there is a plan.

    Raises RuntimeError where no device may idle and the solver's own limit runs out.
    """
    needed = list(constraints(problem))
    if has_plan(problem, needed):
        return () if _none_idles(problem) else (_NO_IDLE,)
    # What is tried first is dropped first: a pool that is large enough must not be named for being finite.
    for constraint in tuple(needed):
        others = [other for other in needed if other != constraint]
        if not has_plan(problem, others):
            needed = others
    return tuple(needed)


def constraints(problem: Problem) -> tuple[Constraint, ...]:
    """Every constraint that could be part of a conflict. Where an option is missing altogether, that alone is one."""
    if not problem.training:
        return (Constraint("one_training", "some layout must train the model; none fits any pool"),)
    if not problem.engines:
        return (Constraint("every_class_once", "some engine must hold the model; none fits any pool"),)
    pools = (
        Constraint("devices", f"pool {pool.name} has {pool.devices:,} devices", pool.name) for pool in problem.pools
    )
    own = (Constraint("own_devices", "training and generation have devices of their own"),)
    return (*pools, *(() if problem.colocated else own), _training(problem), _longest_context(problem))


def has_plan(problem: Problem, kept: Collection[Constraint]) -> bool:
    """Whether a plan exists for which only the constraints in `kept` have to hold; idle devices are allowed."""
    if any(not options for options in (problem.training, problem.engines)):
        return not kept
    families = {constraint.family for constraint in kept}
    limits = {constraint.pool: problem.pool(constraint.pool).devices for constraint in kept if constraint.pool}
    training: list[TrainingOption | None] = [*problem.training] if "one_training" in families else [None]
    needed = problem.longest_context if "longest_context" in families else 0
    engines = [option for option in problem.engines if option.holds >= needed]
    return any(_fit(limits, train, engine, "own_devices" in families) for train, engine in product(training, engines))


def message(conflicting: Collection[Constraint]) -> str:
    """The conflict as what follows "no plan exists:" in an error message."""
    stated = "; ".join(constraint.text for constraint in conflicting)
    if len(conflicting) == 1:
        return stated
    return f"these conflict, and without any one of them there would be a plan: {stated}"


_NO_IDLE = Constraint(
    "no_idle_devices", "no device may idle; no training option and engines use exactly the devices of every pool"
)


def _training(problem: Problem) -> Constraint:
    least = (
        min((option for option in problem.training if option.pool == pool.name), key=lambda option: option.devices)
        for pool in problem.pools
        if any(option.pool == pool.name for option in problem.training)
    )
    stated = " or ".join(f"{option.devices:,} devices of {option.pool} ({option.layout})" for option in least)
    return Constraint("one_training", f"training needs at least {stated}")


def _longest_context(problem: Problem) -> Constraint:
    longest = problem.longest_context
    text = f"an engine must hold the longest context of {longest:,} tokens"
    holding = [option for option in problem.engines if option.holds >= longest]
    if holding:
        least = min(holding, key=lambda option: option.devices)
        return Constraint("longest_context", f"{text} ({least.shape} does, with {least.devices:,} devices)")
    most = max(problem.engines, key=lambda option: option.holds)
    return Constraint("longest_context", f"{text} (the most is {most.holds:,}, by {most.shape})")


def _fit(limits: Mapping[str, int], train: TrainingOption | None, engine: EngineOption, own: bool) -> bool:
    used = {engine.pool: engine.devices}
    if train is not None:
        there = used.get(train.pool, 0)
        used[train.pool] = there + train.devices if own else max(there, train.devices)
    return all(devices <= limits.get(pool, devices) for pool, devices in used.items())


def _none_idles(problem: Problem) -> bool:
    """Whether no device may idle, and none does in some plan; where they may, there is nothing to ask."""
    if not problem.use_all_devices:
        return True
    try:
        solve(problem, tie_break=False)
    except InfeasiblePlanError:
        return False
    return True
