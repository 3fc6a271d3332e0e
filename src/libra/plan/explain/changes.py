"""The same problem with one thing changed: constraints relaxed by one unit, and decisions forbidden.

Invariant: each changed problem differs from the given one in the one thing that is named. A relaxed problem allows
every plan that the given one allows, and a restricted one allows no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from libra.plan.options.price import training_option
from libra.plan.problem import Allocation, Problem


@dataclass(frozen=True, slots=True)
class Change:
    what: str
    problem: Problem
    node_of: str | None = None  # the pool, if the change is one more node


def relaxations(problem: Problem, larger: Mapping[str, Problem], staler: Problem | None = None) -> Iterator[Change]:
    """Every constraint that can be relaxed, by one unit or, where it has none, altogether.

    `larger[pool]` is the problem priced anew with one more node in the pool; for a pool without it the node is added
    and the menu stays, so that larger training layouts are missing. `staler` is the problem priced anew with one more
    version of staleness; without it the menu stays, though more trajectories are then under way.
    """
    for pool in problem.pools:
        pools = tuple(replace(p, nodes=p.nodes + (p == pool)) for p in problem.pools)
        each = f"one more node of {pool.name} ({pool.devices_per_node:,} devices)"
        more = f"one more device of {pool.name}" if pool.devices_per_node == 1 else each
        yield Change(more, larger.get(pool.name, replace(problem, pools=pools)), node_of=pool.name)
    if not problem.colocated:
        yield Change(
            f"staleness {problem.staleness + 1} instead of {problem.staleness}",
            replace(problem, staleness=problem.staleness + 1) if staler is None else staler,
        )
    if problem.most_buckets is not None:
        more = f"at most {problem.most_buckets + 1} buckets instead of {problem.most_buckets}"
        yield Change(more, replace(problem, most_buckets=problem.most_buckets + 1))
    if problem.one_bucket_per_shape:
        yield Change("more than one bucket of a shape", replace(problem, one_bucket_per_shape=False))
    longest = problem.longest_context
    shorter = max((peak for peak in problem.peaks if peak < longest), default=longest)
    # The work stays, and so do the classes: what it would be were trajectories cut is another problem.
    if any(shorter <= option.holds < longest for option in problem.engines):
        what = f"longest context {shorter:,} instead of {longest:,} tokens, for the same work"
        yield Change(what, _holding(problem, shorter))
    if any(option.holds < longest for option in problem.engines):
        yield Change("memory for the longest context on every engine", _holding(problem, 0))
    yield Change("no waiting for a step's longest trajectories", _without_longest(problem))


def restrictions(problem: Problem, allocation: Allocation) -> Iterator[Change]:
    """The decisions of an allocation that fits, each forbidden."""
    option = training_option(problem, allocation)
    others = tuple(other for other in problem.training if other != option)
    yield Change("train on other devices or in another layout", replace(problem, training=others))
    for shape in dict.fromkeys(bucket.shape for bucket in allocation.buckets):
        engines = tuple(engine for engine in problem.engines if engine.shape != shape)
        yield Change(f"no {shape}", replace(problem, engines=engines))
    buckets = len(allocation.buckets)
    for fewer in sorted({1, buckets - 1} - {0, buckets}, reverse=True):
        what = "a single bucket" if fewer == 1 else f"{fewer} buckets"
        yield Change(what, replace(problem, most_buckets=fewer))


def without_strays(problem: Problem) -> Problem:
    """The problem with a router that brings all work to its own bucket."""
    everything = ((1.0,) * len(problem.peaks),)
    return replace(problem, reach_tried=everything, reach_untried=everything)


def _without_longest(problem: Problem) -> Problem:
    """The problem in which engines have their work, and no trajectory takes longer than its share of it."""
    engines = tuple(replace(option, generates=(), waits=()) for option in problem.engines)
    return replace(problem, engines=engines, met=(False,) * len(problem.met))


def _holding(problem: Problem, at_least: int) -> Problem:
    """The problem in which every engine that holds so many tokens holds the longest context, too."""
    longest = problem.longest_context
    engines = tuple(replace(o, holds=max(o.holds, longest if o.holds >= at_least else 0)) for o in problem.engines)
    return replace(problem, engines=engines)
