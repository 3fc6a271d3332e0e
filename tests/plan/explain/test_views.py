"""What an allocation shows of itself: the parts of its step, its buckets, and why devices idle."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from oracles.small_problem import LONG, PROBLEM, one_shape
from tables import by_name

from libra.plan.allocation import Allocation, Bucket
from libra.plan.explain.views import bound_of, bucket_views, pool_views
from libra.plan.model.solve import solve
from libra.plan.options.menu import Rejected
from libra.plan.options.price import price
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption

TWO_ENGINES = Allocation(2, (Bucket("e", 2, 0, 100),), "t")


def shared(generates: float, waits: float) -> dict[str, object]:
    return {"generates": generates, "waits": waits}


BOUNDS = [
    ("rollout", (6.0, 3.0), (1.0, 1.0), {}, {"rollout": 4.5}, 1 - 4.0 / 4.5),
    ("training", (4.0, 3.0), (1.0, 1.0), {}, {"training": 4.0}, 0.125),
    ("latency", (4.0, 3.0), (1.0, 6.0), {}, {"latency": 3.0, "training": 2.0, "publication": 0.25}, 1 - 4.0 / 5.25),
    # A synchronous step is a sum of work, or the longest trajectory where that is longer, and of what follows.
    ("sync, rollout", (4.0, 6.0), (1.0, 1.0), {"staleness": 0},
     {"rollout": 5.0, "training": 4.0, "publication": 0.5}, 1 - 5.0 / 9.5),
    ("sync, latency", (4.0, 3.0), (1.0, 6.0), {"staleness": 0},
     {"latency": 6.0, "training": 4.0, "publication": 0.5}, 1 - 4.0 / 10.5),
    # (9.911 - 3.5) (9.911 - 4.5) = 3.5 * 9.911
    ("sync, batches", (6.0, 3.0), (1.0, 1.0), {"staleness": 0, **shared(3.5, 3.5)},
     {"rollout": 9.911, "training": 4.0, "publication": 0.5}, 4.5 / 14.411),
    # Of batches that overlap, half of each part: (16 - 4.5 - 1.9) (8 - 7.5) = 0.6 * 8, and 2.5 of 16 are the longest's,
    ("batches, rollout", (9.0, 6.0), (1.0, 1.0), shared(0.6, 1.9),
     {"rollout": 4.5, "training": 2.0, "latency": 1.25, "publication": 0.25}, 0.5 / 8),
    # (16 - 4.5 - 3.5) (8 - 4.5) = 3.5 * 8,
    ("batches, latency", (6.0, 3.0), (1.0, 1.0), shared(3.5, 3.5),
     {"latency": 3.5, "rollout": 2.25, "training": 2.0, "publication": 0.25}, 3.5 / 8),
    # (10 - 4.5 - 0.7) (5 - 1.8) = 3.072 * 5, just longer than training,
    ("batches, mostly training", (3.0, 0.6), (1.0, 1.0), shared(3.072, 0.7),
     {"training": 2.0, "latency": 1.886, "rollout": 0.864, "publication": 0.25}, 0.2),
    # and (7 - 4.5 - 0.75) (3.5 - 1.5) = 3.5, for which training has no time.
    ("batches, training", (2.0, 1.0), (1.0, 1.0), shared(1.0, 0.75), {"training": 4.0}, 0.125),
    # Where the longest is in time anyway nothing is a sum.
    ("batches, only rollout", (6.0, 3.0), (1.0, 1.0), shared(0.0, 1.0), {"rollout": 4.5}, 1 - 4.0 / 4.5),
]  # fmt: skip


@by_name("work, residence, fields, parts, slack", BOUNDS)
def test_the_parts_of_a_step_are_named_the_largest_first(
    work: tuple[float, float],
    residence: tuple[float, float],
    fields: dict[str, object],
    parts: dict[str, float],
    slack: float,
) -> None:
    problem = one_shape(work, residence, **fields)
    bound = bound_of(problem, TWO_ENGINES)
    assert [name for name, _ in bound.parts] == list(parts)
    assert dict(bound.parts) == pytest.approx(parts, abs=1e-3)
    assert (bound.by, bound.batches) == (next(iter(parts)) if len(parts) == 1 else "latency", 1 + problem.staleness)
    assert bound.slack == pytest.approx(slack, abs=1e-3)


def test_buckets_of_batches_show_what_their_engines_take_and_what_follows() -> None:
    """Two engines of 9 s of work and 1 s for weights; the longest trajectory generates for 4 s and waits for 2 s."""
    problem = one_shape((6.0, 3.0), (1.0, 6.0), stall=1.0, generates=4.0, waits=2.0)
    # (2 T - 4.5 - 2) (T - 5.5) = 4 T, and (2 T - 8.5 - 2) (T - 5.5) = 4 T
    for replicas, follows, end in ((2, 4.5, (21.5 + 176.25**0.5) / 4), (1, 8.5, (25.5 + 188.25**0.5) / 4)):
        allocation = replace(TWO_ENGINES, replicas=replicas)
        (bucket,) = bucket_views(problem, allocation)
        assert (bucket.load, bucket.residence, bucket.latency) == pytest.approx((5.5, 2 * end - follows, end))
        assert bucket.share == 1.0 == bucket.latency / price(problem, allocation).step
    slow = replace(problem, training=(TrainingOption("t", "p", 2, 2, 30.0, 0.5),))
    (bucket,) = bucket_views(slow, TWO_ENGINES)
    assert (30 * bucket.share, bucket.latency) == pytest.approx(((47.5 + 826.25**0.5) / 4,) * 2)


# The best plan of eight devices takes 7.5 s: 2 * 7.5 - 5 leave 10 s for a trajectory.
OTHER = replace(LONG, shape="other", pool="b", devices=8)


def with_idle_pool(engine: EngineOption | None) -> Problem:
    engines = (*PROBLEM.engines, *(() if engine is None else (engine,)))
    return replace(PROBLEM, pools=(*PROBLEM.pools, Pool("b", 1, 8)), engines=engines)


CASES: list[tuple[str, EngineOption | None, str]] = [
    ("no engine", None, "no engine there: the weights do not fit"),
    ("not needed", replace(OTHER, residence=(10.0, 10.0)), "not needed: they would not shorten the step"),
    ("tools take too long", replace(OTHER, residence=(20.0, 20.0)), "takes 20.00 s even by itself"),
    ("new weights take too long", replace(OTHER, stall=7.6), "loading new weights takes 7.60 s"),
    ("short of memory", replace(OTHER, holds=10), "engines there hold 10 tokens at most"),
]


@by_name("engine, reason", CASES)
def test_the_reason_is_what_keeps_engines_there_from_serving(engine: EngineOption | None, reason: str) -> None:
    problem = with_idle_pool(engine)
    allocation = solve(problem).allocation
    idle = pool_views(problem, allocation, [Rejected("b/tp1", "does not fit", "the weights do not fit")])[-1]
    assert (idle.name, idle.idle) == ("b", 8)
    assert reason in idle.why_idle


def test_where_nothing_idles_there_is_nothing_to_say() -> None:
    problem = replace(PROBLEM, use_all_devices=True)
    assert [(pool.idle, pool.why_idle) for pool in pool_views(problem, solve(problem).allocation)] == [(0, "")]


@by_name(
    "engines, replicas, idle, reason",
    [
        ("all work", 4, 4, 0, ""),
        (
            "one generates nothing",
            3,
            4,
            1,
            "1 through the rollout: not needed: they would not shorten the step",
        ),
        ("two train nothing", 4, 2, 2, "2 through training: t takes 2"),
        ("both", 3, 2, 2, "1 through the rollout: not needed: .*; 2 through training: t takes 2"),
    ],
)
def test_devices_of_a_colocated_plan_idle_in_either_phase(engines: int, replicas: int, idle: int, reason: str) -> None:
    problem = one_shape((6.0, 3.0), (1.0, 1.0), staleness=0, colocated=True)
    problem = replace(
        problem,
        pools=(Pool("p", 1, 4),),
        training=tuple(TrainingOption("t", "p", count, count, 8.0 / count, 0.5) for count in (2, 4)),
    )
    (pool,) = pool_views(problem, Allocation(replicas, (Bucket("e", engines, 0, 100),), "t"))
    assert pool.idle == idle
    assert re.fullmatch(reason, pool.why_idle)
