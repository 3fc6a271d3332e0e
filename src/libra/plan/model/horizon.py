"""Plans several periods at once, with the cost of changes between allocations.

Invariant: no sequence of candidates takes less time, including steps and switches. The candidates are the best
allocation of each period, its best allocation with the training option of each other period, the running allocation,
and the caller's additions.

Let c(p, a) be the seconds of period p under allocation a, and s(p, a, b) the seconds lost by a change from a to b when
p begins. The shortest time until the end of p, with b in period p, is (Bellman 1957)

    t(p, b) = c(p, b) + min over a of  t(p - 1, a) + s(p, a, b)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from libra.plan.allocation import Allocation
from libra.plan.model.solve import solve
from libra.plan.options.price import devices_used, infeasibility, price, training_option
from libra.plan.problem import InfeasiblePlanError, Problem

# Seconds lost by a change of allocation, for the problem of the period that begins.
SwitchSeconds = Callable[[Problem, Allocation, Allocation], float]


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Number of devices of a pool by role over all periods. A change of layout is no change of role."""

    pool: str
    core: int  # train in every period
    hybrid: int  # train in some periods only
    rollout: int  # train in no period


@dataclass(frozen=True, slots=True)
class HorizonPlan:
    """The allocation of each period; times are seconds."""

    allocations: tuple[Allocation, ...]  # [period]
    step_seconds: tuple[float, ...]  # [period] predicted, of one optimiser step
    switch_seconds: tuple[float, ...]  # [period] lost at its start
    seconds: float  # all steps and switches
    pools: tuple[PoolSizes, ...]


def plan_horizon(
    problems: Sequence[Problem],
    steps: Sequence[int],
    switch_seconds: SwitchSeconds,
    current: Allocation | None = None,
    candidates: Iterable[Allocation] = (),
) -> HorizonPlan:
    """Find the sequence of allocations, one for each period of `steps[p]` steps, with the least total time.

    The start costs no time if `current` is None. An allocation can be used only in periods whose problem it fits, so
    let all problems offer the same shapes and layouts (`sharing_layouts` of `libra.plan.options.cluster_request`).
    `candidates` are considered in addition. Raises ValueError if there is no period or a period has no step,
    InfeasiblePlanError if a period has no plan.
    """
    if not problems or len(problems) != len(steps):
        raise ValueError(f"there are {len(problems)} problems for {len(steps)} periods; give each period its problem")
    if any(count < 1 for count in steps):
        raise ValueError(f"steps is {tuple(steps)}; every period has 1 step or more")
    considered = list(dict.fromkeys([*([current] if current else []), *candidates, *optima(problems, current)]))
    held = [
        [price(problem, each).step * count if infeasibility(problem, each) is None else math.inf for each in considered]
        for problem, count in zip(problems, steps, strict=True)
    ]

    def switch(period: int, a: int, b: int) -> float:
        return switch_seconds(problems[period], considered[a], considered[b])

    path = shortest_path(held, switch, None if current is None else 0)
    came = [*([0] if current else [path[0]]), *path[:-1]]
    lost = tuple(0.0 if a == b else switch(p, a, b) for p, (a, b) in enumerate(zip(came, path, strict=True)))
    allocations = tuple(considered[b] for b in path)
    return HorizonPlan(
        allocations=allocations,
        step_seconds=tuple(held[p][b] / steps[p] for p, b in enumerate(path)),
        switch_seconds=lost,
        seconds=math.fsum([*(held[p][b] for p, b in enumerate(path)), *lost]),
        pools=pool_sizes(problems, allocations),
    )


def optima(problems: Sequence[Problem], current: Allocation | None) -> tuple[Allocation, ...]:
    """For each period, the best allocation, and the best allocations with the training options of the other periods. Of
    equally good allocations, the closest to that of the previous period.
    """
    best: list[Allocation] = []
    for problem in problems:
        best.append(solve(replace(problem, current=best[-1] if best else current)).allocation)
    found = list(best)
    for problem, own in zip(problems, best, strict=True):
        for other in dict.fromkeys(best):
            option = training_option(problem, other)
            if option is None or (other.layout, other.replicas) == (own.layout, own.replicas):
                continue
            try:
                found.append(solve(replace(problem, training=(option,), current=own)).allocation)
            except InfeasiblePlanError:
                continue  # this period has no plan with that training option
    return tuple(dict.fromkeys(found))


def shortest_path(
    held: Sequence[Sequence[float]], switch: Callable[[int, int, int], float], start: int | None
) -> tuple[int, ...]:
    """[period] index of the candidate to use.

    `held[p][a]` is the seconds of period p under candidate a, infinite if impossible. `switch(p, a, b)` is the seconds
    lost by a change from a to b at the start of p; 0 is assumed for a = b. `start` is the candidate in use before the
    first period; None: no candidate is, and the first one costs no switch. Among equal paths, the one with fewer
    changes is chosen.
    """
    many = range(len(held[0]))
    reached = [0.0 if start in (None, a) else math.inf for a in many]
    came: list[list[int]] = []
    for period, seconds in enumerate(held):
        arrive, sources = list(reached), list(many)
        for b in many:
            if seconds[b] == math.inf or (period == 0 and start is None):
                continue
            for a in many:
                if a == b or not reached[a] < arrive[b]:
                    continue
                total = reached[a] + switch(period, a, b)
                if total < arrive[b]:
                    arrive[b], sources[b] = total, a
        reached = [total + own for total, own in zip(arrive, seconds, strict=True)]
        came.append(sources)
    if min(reached) == math.inf:
        raise InfeasiblePlanError(
            "no sequence of candidates fits all periods: give more candidates, or problems "
            "with the same shapes and layouts"
        )
    path = [min(many, key=lambda a: reached[a])]
    for sources in reversed(came[1:]):
        path.append(sources[path[-1]])
    return tuple(reversed(path))


def pool_sizes(problems: Sequence[Problem], allocations: Sequence[Allocation]) -> tuple[PoolSizes, ...]:
    """Core, hybrid and rollout devices of the allocations; the pools are those of the last problem. Idle devices count
    as rollout, or as hybrid if they train in other periods."""
    trained = [devices_used(problem, each) for problem, each in zip(problems, allocations, strict=True)]
    sizes = []
    for pool in problems[-1].pools:
        counts = [used[pool.name][0] for used in trained]
        sizes.append(PoolSizes(pool.name, min(counts), max(counts) - min(counts), pool.devices - max(counts)))
    return tuple(sizes)
