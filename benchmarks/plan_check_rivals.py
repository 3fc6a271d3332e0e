"""Plans that a person, or chance, would make for the same question.

Invariant: a rival fits its problem, and is determined by its name, the problem and the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from libra.plan.allocation import Allocation, Bucket
from libra.plan.model.solve import solve
from libra.plan.options.price import infeasibility
from libra.plan.problem import InfeasiblePlanError, Problem, TrainingOption

RANDOM = 6  # random plans of a question
_TRIES = 2_000


def rivals(problem: Problem, seed: int) -> dict[str, Allocation]:
    """One size of engines, an even split, the greedy plan, and random plans of the menu; those that exist."""
    found: dict[str, Allocation] = {}
    single = replace(problem, most_buckets=1)
    for name, training in (
        ("one size", problem.training),
        ("even split", _even(problem)),
        ("greedy", _most_efficient(problem)),
    ):
        try:
            found[name] = solve(replace(single, training=tuple(training)), tie_break=False).allocation
        except InfeasiblePlanError:
            continue
    drawn = random.Random(seed)
    for number, allocation in enumerate(_random_plans(problem, drawn), start=1):
        found[f"random {number}"] = allocation
    return found


def _even(problem: Problem) -> list[TrainingOption]:
    """Training on the number of devices that is nearest to half of all."""
    half = sum(pool.devices for pool in problem.pools) / 2
    nearest = min(abs(option.devices - half) for option in problem.training)
    return [option for option in problem.training if abs(option.devices - half) == nearest]


def _most_efficient(problem: Problem) -> list[TrainingOption]:
    """Training where a device second buys most, whatever that makes of the step."""
    return [min(problem.training, key=lambda option: option.seconds * option.devices)]


def _random_plans(problem: Problem, drawn: random.Random) -> Iterator[Allocation]:
    found: set[Allocation] = set()
    for _ in range(_TRIES):
        allocation = _drawn_plan(problem, drawn)
        if allocation is not None and allocation not in found and infeasibility(problem, allocation) is None:
            found.add(allocation)
            yield allocation
            if len(found) == RANDOM:
                return


def _drawn_plan(problem: Problem, drawn: random.Random) -> Allocation | None:
    """Training and ranges drawn evenly; then engines, until no device is left for another."""
    training = drawn.choice(problem.training)
    most = problem.most_buckets or 3
    ends = sorted(drawn.sample(problem.peaks[:-1], min(drawn.randint(1, most), len(problem.peaks)) - 1))
    limits = [*dict.fromkeys(end for end in ends if end < problem.longest_context), problem.longest_context]
    shapes: list[str] = []
    for limit in limits:
        fitting = sorted({option.shape for option in problem.engines if option.holds >= limit} - set(shapes))
        if not fitting:
            return None
        shapes.append(drawn.choice(fitting))
    left = {pool.name: pool.devices for pool in problem.pools}
    if not problem.colocated:
        left[training.pool] -= training.devices
    counts = _filled(problem, shapes, left, drawn)
    if counts is None:
        return None
    buckets = tuple(
        Bucket(shape, count, above, up_to)
        for shape, count, above, up_to in zip(shapes, counts, [0, *limits[:-1]], limits, strict=True)
    )
    return Allocation(training.replicas, buckets, training.layout)


def _filled(problem: Problem, shapes: Sequence[str], left: dict[str, int], drawn: random.Random) -> list[int] | None:
    """Engines of each shape, one of each first; None where not even those fit."""
    counts = [0] * len(shapes)

    def take(which: int) -> bool:
        uses = problem.uses(shapes[which])
        if any(left[pool] < devices for pool, devices in uses.items()):
            return False
        for pool, devices in uses.items():
            left[pool] -= devices
        counts[which] += 1
        return True

    if not all(take(which) for which in range(len(shapes))):
        return None
    while any(take(which) for which in drawn.sample(range(len(shapes)), len(shapes))):
        pass
    return counts
