"""One problem that can be worked out by hand, and its allocations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from libra.plan.allocation import Allocation, Bucket
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption

SHORT_FEW = EngineOption("short", "a", 1, 4, 2000, 0.5, ((8.0, 16.0), (6.0, 20.0)), (0.0, 0.0), (4.0, 10.0))
SHORT_MANY = EngineOption("short", "a", 1, 8, 2000, 0.5, ((4.0, 8.0), (6.0, 12.0)), (0.0, 0.0), (6.0, 10.0))
LONG = EngineOption("long", "a", 2, 4, 5000, 1.0, ((5.0, 10.0),), (0.0, 0.0), (5.0, 10.0))
ONE = TrainingOption("copies", "a", 1, 1, 8.0, 1.0)
TWO = TrainingOption("copies", "a", 2, 2, 4.0, 1.0)

PROBLEM = Problem(
    pools=(Pool("a", 2, 4),),
    engines=(SHORT_FEW, SHORT_MANY, LONG),
    training=(ONE, TWO),
    peaks=(1000, 4000),
    expected=(True, True),
    longest_context=5000,
    recall_known=((1.0, 0.5),),
    recall_possible=((1.0, 0.5), (0.5, 0.0)),
    staleness=1,
)


def problem_of(
    pools: tuple[Pool, ...],
    engines: tuple[EngineOption, ...],
    training: tuple[TrainingOption, ...],
    peaks: tuple[int, ...],
    **fields: Any,
) -> Problem:
    """A problem whose classes all occur, with a router that knows every length."""
    every = (1.0,) * len(peaks)
    given = {"longest_context": peaks[-1], "recall_known": (every,), "recall_possible": (every,), **fields}
    return Problem(pools, engines, training, peaks, (True,) * len(peaks), **given)


def one_bucket(replicas: int, engines: int) -> Allocation:
    return Allocation(replicas, (Bucket("long", engines, 0, 5000),), "copies")


def two_buckets(replicas: int, short: int, long: int, *, cut: int = 1000, end: int = 5000) -> Allocation:
    return Allocation(replicas, (Bucket("short", short, 0, cut), Bucket("long", long, cut, end)), "copies")


def one_shape(
    work: tuple[float, float],
    residence: tuple[float, float],
    *,
    stall: float = 0.0,
    generates: float = 0.0,
    waits: float = 0.0,
    **fields: object,
) -> Problem:
    """A problem of two classes on four single devices. One device trains in 8 s, and more devices train faster."""
    lines = (((generates,) * 2,), ((waits,) * 2,)) if generates or waits else ((), ())
    engine = EngineOption("e", "p", 1, 8, 100, stall, (work,), (0.0, 0.0), residence, *lines)
    training = tuple(TrainingOption("t", "p", n, n, 8.0 / n, 0.5) for n in (1, 2, 3))
    problem = Problem((Pool("p", 2, 2),), (engine,), training, (10, 100), (True, True), 100, ((1, 1),), ((1, 1),), 1)
    return replace(problem, **fields)  # type: ignore[arg-type]
