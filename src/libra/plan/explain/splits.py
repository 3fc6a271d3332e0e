"""What every split of the devices between training and generation would come to.

Invariant: of each split, training and generation are the fastest there are, each on its own: training as priced, and
generation as the solver finds it on what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from libra.plan.model.solve import solve
from libra.plan.options.price import fixed_seconds
from libra.plan.problem import InfeasiblePlanError, Problem, TrainingOption


@dataclass(frozen=True, slots=True)
class Split:
    """One training option, and the best generation on the devices that it leaves.

    `generation` is the step that engines and the longest trajectory would keep if training bounded nothing, but
    delayed publication as it does. Synchronous training waits for it, `step` is then a sum; else `step` is the larger.
    """

    layout: str
    pool: str
    devices: int  # that train
    training: float
    generation: float
    step: float


def splits(
    problem: Problem,
    most: int,
    own: TrainingOption | None = None,
    *,
    deterministic_limit: float = 30.0,
    seed: int = 0,
) -> tuple[Split, ...]:
    """By pool and devices that train; where there are more than `most` splits, evenly spread ones, ends included, and
    the one of the plan's `own` option.

    Splits that leave no engine for the longest context are left out.
    """
    found = []
    for option in _spread(_fastest(problem), most, own):
        try:
            generation = _generation(problem, option, deterministic_limit, seed)
        except InfeasiblePlanError:
            continue
        step = max(option.seconds, generation)
        if problem.staleness == 0:
            step = max(step, generation + fixed_seconds(problem, option))
        found.append(Split(option.layout, option.pool, option.devices, option.seconds, generation, step))
    return tuple(found)


def _generation(problem: Problem, option: TrainingOption, deterministic_limit: float, seed: int) -> float:
    # No step is shorter than its share of what follows generation: seconds that bound nothing, and start the search.
    fixed = option.follows + option.publish
    floor = fixed / (1 + problem.staleness)
    unbound = replace(option, seconds=floor, publish=fixed - floor, tail=None)
    alone = replace(problem, training=(unbound,))
    step = solve(alone, deterministic_limit=deterministic_limit, seed=seed, tie_break=False).predicted.step
    return step if problem.staleness else step - fixed_seconds(problem, option)


def _fastest(problem: Problem) -> list[TrainingOption]:
    """One option for each pool and number of devices."""
    pools = [pool.name for pool in problem.pools]
    fastest: dict[tuple[int, int], TrainingOption] = {}
    for option in problem.training:
        key = (pools.index(option.pool), option.devices)
        if key not in fastest or option.seconds < fastest[key].seconds:
            fastest[key] = option
    return [fastest[key] for key in sorted(fastest)]


def _spread(options: Sequence[TrainingOption], most: int, own: TrainingOption | None) -> Sequence[TrainingOption]:
    if len(options) <= most:
        return options
    last = len(options) - 1
    kept = {round(k * last / (most - 1)) for k in range(most)}
    same = (k for k, o in enumerate(options) if own is not None and (o.pool, o.devices) == (own.pool, own.devices))
    return [options[k] for k in sorted(kept.union(same))]
