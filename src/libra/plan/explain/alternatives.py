"""Problems with one thing changed: a constraint relaxed, a decision forbidden, another split of the devices.

Invariant: an alternative differs from the problem only in the named change. A relaxed problem allows all plans of the
given problem; a restricted problem allows only plans of the given problem. Each split has the fastest training and the
fastest generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from libra.plan.allocation import Allocation
from libra.plan.explain.explanation import Split
from libra.plan.model.solve import solve
from libra.plan.options.price import fixed_seconds, own_training
from libra.plan.problem import Family, InfeasiblePlanError, Problem, TrainingOption

MOST_SPLITS = 40


@dataclass(frozen=True, slots=True)
class Alternative:
    what: str
    problem: Problem
    relaxes: Family | None = None  # None: it forbids a decision
    node_of: str | None = None  # the pool that has one more node


def relaxations(
    problem: Problem, larger: Mapping[str, Problem], staler: Problem | None = None
) -> Iterator[Alternative]:
    """Yield a problem for each constraint that can be relaxed: by one unit, or completely if the constraint has no
    unit.

    `larger[pool]` is the problem priced again with one more node in the pool. For other pools, the node is added to the
    same menu, so larger training layouts are missing. `staler` is the problem priced again with one more version of
    staleness. Without `staler` the menu is unchanged, although one more version puts more trajectories in flight.
    """
    for pool in problem.pools:
        pools = tuple(replace(p, nodes=p.nodes + (p == pool)) for p in problem.pools)
        each = f"one more node of {pool.name} ({pool.devices_per_node:,} devices)"
        if pool.serves:
            each = f"one more node of {pool.name}, as busy as the others ({pool.devices_per_node:,} devices)"
        more = f"one more device of {pool.name}" if pool.devices_per_node == 1 else each
        yield Alternative(more, larger.get(pool.name, replace(problem, pools=pools)), "devices", pool.name)
    if not problem.colocated:
        yield Alternative(
            f"staleness {problem.staleness + 1} instead of {problem.staleness}",
            replace(problem, staleness=problem.staleness + 1) if staler is None else staler,
            "latency",
        )
    if problem.most_buckets is not None:
        more = f"at most {problem.most_buckets + 1} buckets instead of {problem.most_buckets}"
        yield Alternative(more, replace(problem, most_buckets=problem.most_buckets + 1), "most_buckets")
    if problem.one_bucket_per_shape:
        yield Alternative(
            "more than one bucket of a shape", replace(problem, one_bucket_per_shape=False), "one_bucket_per_shape"
        )
    longest = problem.longest_context
    shorter = max((peak for peak in problem.peaks if peak < longest), default=longest)
    # The work and the classes stay: shorter trajectories would be another problem.
    own = [option for option in problem.engines if option.shape not in problem.lent]
    if any(shorter <= option.holds < longest for option in own):
        what = f"longest context {shorter:,} instead of {longest:,} tokens, for the same work"
        yield Alternative(what, _holding(problem, shorter), "longest_context")
    if any(option.holds < longest for option in own):
        yield Alternative("memory for the longest context on every engine", _holding(problem, 0), "longest_context")
    yield Alternative("no waiting for a step's longest trajectories", _without_longest(problem), "latency")


def restrictions(problem: Problem, allocation: Allocation) -> Iterator[Alternative]:
    """Yield problems that each forbid one decision of `allocation`, which fits the problem."""
    option = own_training(problem, allocation)
    others = tuple(other for other in problem.training if other != option)
    yield Alternative("train on other devices or in another layout", replace(problem, training=others))
    if problem.lent & {bucket.shape for bucket in allocation.buckets}:
        engines = tuple(engine for engine in problem.engines if engine.shape not in problem.lent)
        yield Alternative("no loan", replace(problem, engines=engines))
    for shape in dict.fromkeys(bucket.shape for bucket in allocation.buckets):
        engines = tuple(engine for engine in problem.engines if engine.shape != shape)
        yield Alternative(f"no {shape}", replace(problem, engines=engines))
    buckets = len(allocation.buckets)
    for fewer in sorted({1, buckets - 1} - {0, buckets}, reverse=True):
        what = "a single bucket" if fewer == 1 else f"{fewer} buckets"
        yield Alternative(what, replace(problem, most_buckets=fewer))


def without_strays(problem: Problem) -> Problem:
    """The problem with a perfect router, which routes all work to its own bucket."""
    everything = ((1.0,) * len(problem.peaks),)
    return replace(problem, recall_known=everything, recall_possible=everything)


def _without_longest(problem: Problem) -> Problem:
    """The problem without waits for longest trajectories; engines keep their work."""
    engines = tuple(replace(option, generates=(), waits=()) for option in problem.engines)
    return replace(problem, engines=engines, expected=(False,) * len(problem.expected))


def _holding(problem: Problem, at_least: int) -> Problem:
    """The problem in which every own engine that holds `at_least` tokens also holds the longest context."""
    longest, lent = problem.longest_context, problem.lent
    engines = (replace(o, holds=longest) if o.shape not in lent and o.holds >= at_least else o for o in problem.engines)
    return replace(problem, engines=tuple(engines))


def splits(problem: Problem, own: TrainingOption | None = None, most: int = MOST_SPLITS) -> tuple[Split, ...]:
    """One split for each pool and number of training devices, except splits that leave no engine for the longest
    context. More than `most` splits are reduced to evenly spread splits, both ends, and the split of the plan's
    training option `own`.
    """
    found = []
    for option in _spread(_fastest(problem), most, own):
        try:
            generation = _generation(problem, option)
        except InfeasiblePlanError:
            continue
        step = max(option.seconds, generation)
        if problem.staleness == 0:
            step = max(step, generation + fixed_seconds(problem, option))
        found.append(Split(option.layout, option.pool, option.devices, option.seconds, generation, step))
    return tuple(found)


def _generation(problem: Problem, option: TrainingOption) -> float:
    # No step is shorter than its share of the seconds that follow generation. Training that takes only this share never
    # bounds the step.
    fixed = option.after_rollout + option.publish
    floor = fixed / (1 + problem.staleness)
    unbound = replace(option, seconds=floor, publish=fixed - floor, tail=None)
    alone = replace(problem, training=(unbound,))
    step = solve(alone, tie_break=False).predicted.step
    return step if problem.staleness else step - fixed_seconds(problem, option)


def _fastest(problem: Problem) -> list[TrainingOption]:
    """The fastest option for each pool and number of devices."""
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
