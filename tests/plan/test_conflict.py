"""Conflicts of infeasible problems: named, complete, and minimal by trying every subset."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra.plan.explain.conflict import Constraint, conflict, constraints, has_plan, message
from libra.plan.model.relaxation import require_feasible
from libra.plan.problem import EngineOption, InfeasiblePlanError, Pool, Problem, TrainingOption


def engine(shape: str, pool: str, devices: int, holds: int) -> EngineOption:
    return EngineOption(shape, pool, devices, 8, holds, 0.0, ((1.0,),), (0.0,), (1.0,))


def training(layout: str, pool: str, devices: int) -> TrainingOption:
    return TrainingOption(layout, pool, devices, devices, 1.0, 0.0)


def menu(
    pools: dict[str, int], engines: list[EngineOption], options: list[TrainingOption], **fields: object
) -> Problem:
    everything = ((1.0,),)
    problem = Problem(
        pools=tuple(Pool(name, devices, 1) for name, devices in pools.items()),
        engines=tuple(engines),
        training=tuple(options),
        peaks=(10,),
        met=(True,),
        longest_context=10,
        reach_tried=everything,
        reach_untried=everything,
    )
    return replace(problem, **fields)  # type: ignore[arg-type]


@st.composite
def menus(draw: st.DrawFn) -> Problem:
    names = draw(st.sampled_from([("a",), ("a", "b"), ("a", "b", "c")]))
    few, pool = st.integers(1, 6), st.sampled_from(names)
    engines = [engine(f"s{k}", draw(pool), draw(few), draw(st.integers(8, 11))) for k in range(draw(st.integers(0, 3)))]
    options = [training(f"t{k}", draw(pool), draw(few)) for k in range(draw(st.integers(0, 3)))]
    return menu({name: draw(few) for name in names}, engines, options, colocated=draw(st.booleans()))


def is_feasible(problem: Problem) -> bool:
    try:
        require_feasible(problem)
    except InfeasiblePlanError:
        return False
    return True


def dropped(problem: Problem, kept: Collection[Constraint]) -> Problem:
    """The problem without all constraints but `kept`, as a problem: what is dropped is made to hold."""
    kinds = {constraint.kind for constraint in kept}
    limited = {constraint.pool for constraint in kept}
    pools = [pool if pool.name in limited else replace(pool, nodes=1000) for pool in problem.pools]
    changed = replace(problem, pools=(*pools, Pool("elsewhere", 2, 1)))
    if "training" not in kinds:
        changed = replace(changed, training=(training("free", "elsewhere", 1),))
    if "engines" not in kinds and not problem.engines:
        changed = replace(changed, engines=(engine("free", "elsewhere", 1, 1000),))
    if "longest context" not in kinds:
        changed = replace(changed, engines=tuple(replace(option, holds=1000) for option in changed.engines))
    return changed if "own devices" in kinds else replace(changed, colocated=True)


@settings(max_examples=300, deadline=None)
@given(menus())
@example(menu({"a": 8}, [], [training("t", "a", 8)]))
@example(menu({"a": 8}, [engine("s", "a", 8, 10)], []))
def test_a_conflict_is_minimal_and_empty_exactly_where_a_plan_exists(problem: Problem) -> None:
    found = conflict(problem)
    assert bool(found) != is_feasible(problem)
    if not found:
        return
    assert set(found) <= set(constraints(problem))
    for size in range(len(found) + 1):
        for kept in combinations(found, size):
            assert is_feasible(dropped(problem, kept)) == (size < len(found))
            assert has_plan(problem, kept) == (size < len(found))


A100 = [engine("tp1", "a", 1, 6), engine("tp8", "a", 8, 10)]
TABLE = [
    ("a plan exists", menu({"a": 16}, A100, [training("t", "a", 8)]), ()),
    (
        "shorter contexts, more devices, smaller layouts and colocation would each do",
        menu({"a": 15}, A100, [training("dp8", "a", 8)]),
        (
            "pool a has 15 devices",
            "training and generation have devices of their own",
            "training needs at least 8 devices of a (dp8)",
            "an engine must hold the longest context of 10 tokens (tp8 does, with 8 devices)",
        ),
    ),
    (
        "training alone is too large, whatever generates and wherever",
        menu({"a": 4, "b": 9}, [engine("s", "b", 1, 10)], [training("dp6", "a", 6), training("dp10", "b", 10)]),
        (
            "pool a has 4 devices",
            "pool b has 9 devices",
            "training needs at least 6 devices of a (dp6) or 10 devices of b (dp10)",
        ),
    ),
    (
        "memory alone",
        menu({"a": 4}, A100[:1], [training("t", "a", 1)]),
        ("an engine must hold the longest context of 10 tokens (the most is 6, by tp1)",),
    ),
    ("nothing trains", menu({"a": 4}, A100[:1], []), ("some layout must train the model; none fits any pool",)),
    (
        "nothing generates",
        menu({"a": 4}, [], [training("t", "a", 1)]),
        ("some engine must hold the model; none fits any pool",),
    ),
    (
        "an odd pool of even engines",
        menu({"a": 5}, [engine("tp2", "a", 2, 10)], [training("t", "a", 2)], use_all_devices=True),
        ("no device may idle; no training option and engines use exactly the devices of every pool",),
    ),
    ("an even one", menu({"a": 6}, [engine("tp2", "a", 2, 10)], [training("t", "a", 2)], use_all_devices=True), ()),
]


@pytest.mark.parametrize(("problem", "wanted"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_conflicts_are_named(problem: Problem, wanted: tuple[str, ...]) -> None:
    assert tuple(constraint.text for constraint in conflict(problem)) == wanted


def test_the_message_says_that_leaving_one_out_is_enough() -> None:
    several = message(conflict(TABLE[2][1]))
    assert several.startswith(
        "these conflict, and without any one of them there would be a plan: pool a has 4 devices; "
    )
    assert several.count("; ") == 2
    assert message(conflict(TABLE[3][1])) == (
        "an engine must hold the longest context of 10 tokens (the most is 6, by tp1)"
    )
