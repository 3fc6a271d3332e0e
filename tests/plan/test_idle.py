"""Idle devices have a reason, and it is the right one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracles.small_problem import LONG, PROBLEM

from libra.plan.explain.idle import idle_devices
from libra.plan.model.solve import solve
from libra.plan.problem import EngineOption, Family, Pool, Problem

# The best plan of eight devices takes 7.5 s: 2 * 7.5 - 5 leave 10 s for a trajectory.
OTHER = replace(LONG, shape="other", pool="b", devices=8)


def with_idle_pool(engine: EngineOption | None) -> Problem:
    engines = (*PROBLEM.engines, *(() if engine is None else (engine,)))
    return replace(PROBLEM, pools=(*PROBLEM.pools, Pool("b", 1, 8)), engines=engines)


CASES: list[tuple[str, EngineOption | None, Family | None, str]] = [
    ("no engine", None, "every_class_once", "no engine there: the weights do not fit"),
    ("others suffice", replace(OTHER, residence=(10.0, 10.0)), None, "others suffice"),
    ("tools take too long", replace(OTHER, residence=(20.0, 20.0)), "latency", "takes 20.00 s even by itself"),
    ("new weights take too long", replace(OTHER, stall=7.6), "rollout", "loading new weights takes 7.60 s"),
    ("short of memory", replace(OTHER, holds=10), "longest_context", "engines there hold 10 tokens at most"),
]


@pytest.mark.parametrize(("engine", "family", "reason"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_the_reason_is_what_keeps_engines_there_from_serving(
    engine: EngineOption | None, family: Family | None, reason: str
) -> None:
    problem = with_idle_pool(engine)
    allocation = solve(problem).allocation
    idle = idle_devices(problem, allocation, [("b/tp1", "the weights do not fit")])[-1]
    assert (idle.pool, idle.devices, idle.family) == ("b", 8, family)
    assert reason in idle.reason


def test_where_nothing_idles_there_is_nothing_to_say() -> None:
    problem = replace(PROBLEM, use_all_devices=True)
    assert idle_devices(problem, solve(problem).allocation) == ()
