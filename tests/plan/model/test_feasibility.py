"""A problem is refused exactly when it has no allocation; the conflict is named, complete, and minimal by trying every
subset."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.enumerate_problems import optimum, priced, problems
from oracles.small_problem import LONG, ONE, PROBLEM, TWO, problem_of
from tables import by_name

from libra.plan.model.feasibility import Constraint, ample_step, conflict, constraints, has_plan, require_feasible
from libra.plan.model.solve import solve
from libra.plan.problem import EngineOption, InfeasiblePlanError, Pool, Problem, TrainingOption


def engine(shape: str, pool: str, devices: int, holds: int) -> EngineOption:
    return EngineOption(shape, pool, devices, 8, holds, 0.0, ((1.0,),), (0.0,), (1.0,))


def training(layout: str, pool: str, devices: int) -> TrainingOption:
    return TrainingOption(layout, pool, devices, devices, 1.0, 0.0)


def menu(
    pools: dict[str, int], engines: list[EngineOption], options: list[TrainingOption], **fields: object
) -> Problem:
    problem = problem_of(
        pools=tuple(Pool(name, devices, 1) for name, devices in pools.items()),
        engines=tuple(engines),
        training=tuple(options),
        peaks=(10,),
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
    """Whether some training option leaves room for one engine that holds the longest context."""
    room = {pool.name: pool.devices for pool in problem.pools}
    return any(
        training.devices <= room[training.pool]
        and engine.devices <= room[engine.pool] - (training.devices if shared else 0)
        for training in problem.training
        for engine in problem.engines
        for shared in [training.pool == engine.pool and not problem.colocated]
        if engine.holds >= problem.longest_context
    )


def dropped(problem: Problem, kept: Collection[Constraint]) -> Problem:
    """The problem without all constraints but `kept`, as a problem: what is dropped is made to hold."""
    families = {constraint.family for constraint in kept}
    limited = {constraint.pool for constraint in kept}
    pools = [pool if pool.name in limited else replace(pool, nodes=1000) for pool in problem.pools]
    changed = replace(problem, pools=(*pools, Pool("elsewhere", 2, 1)))
    if "one_training" not in families:
        changed = replace(changed, training=(training("free", "elsewhere", 1),))
    if "every_class_once" not in families and not problem.engines:
        changed = replace(changed, engines=(engine("free", "elsewhere", 1, 1000),))
    if "longest_context" not in families:
        changed = replace(changed, engines=tuple(replace(option, holds=1000) for option in changed.engines))
    return changed if "own_devices" in families else replace(changed, colocated=True)


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
            "training and generation have separate devices",
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
    ("memory alone", menu({"a": 4}, A100[:1], [training("t", "a", 1)]),
     ("an engine must hold the longest context of 10 tokens (the longest that fits is 6, on tp1)",)),
    ("nothing trains", menu({"a": 4}, A100[:1], []), ("a layout must train the model, but none fits any pool",)),
    ("nothing generates", menu({"a": 4}, [], [training("t", "a", 1)]),
     ("an engine must hold the model, but none fits any pool",)),
]  # fmt: skip


@by_name("problem, wanted", TABLE)
def test_conflicts_are_named_and_solvers_say_them(problem: Problem, wanted: tuple[str, ...]) -> None:
    assert tuple(constraint.text for constraint in conflict(problem)) == wanted
    if not wanted:
        return require_feasible(problem)
    with pytest.raises(InfeasiblePlanError) as refused:
        solve(problem)
    message = str(refused.value)
    assert "; ".join(wanted) in message
    assert message.startswith("these constraints conflict, and dropping any one of them would allow a plan: ") == (
        len(wanted) > 1
    )


SMALL = replace(PROBLEM, pools=(Pool("a", 1, 2),))


@pytest.mark.parametrize(
    ("problem", "cause"),
    [
        (menu({"a": 4}, A100[:1], [training("t", "a", 1)]), ": lower the longest context, or add devices or shapes"),
        (SMALL, "add devices, reduce the request, or share devices"),
        (
            replace(SMALL, colocated=True, staleness=0, training=(replace(TWO, devices=3),)),
            "add devices, reduce the request$",
        ),
        (replace(PROBLEM, engines=(LONG,), training=(ONE,), use_all_devices=True), "use_all_devices leaves no plan"),
    ],
)
def test_a_refusal_says_what_would_help(problem: Problem, cause: str) -> None:
    with pytest.raises(InfeasiblePlanError, match=cause):
        solve(problem)


def test_colocated_training_shares_its_devices() -> None:
    """Two devices train, and the same two are one long engine."""
    plan = solve(replace(SMALL, colocated=True, staleness=0))
    assert (plan.allocation.replicas, plan.allocation.engines) == (2, 1)


@settings(max_examples=200, deadline=None)
@given(problems(feasible=False))
def test_a_problem_is_refused_exactly_when_there_is_no_allocation(problem: Problem) -> None:
    possible = bool(priced(problem))
    try:
        solve(problem)
    except InfeasiblePlanError:
        assert not possible
    else:
        assert possible
    idle = replace(problem, use_all_devices=False)
    try:
        require_feasible(idle)
    except InfeasiblePlanError:
        assert not priced(idle)
    else:
        assert priced(idle)


def test_a_plan_without_a_second_to_spare_is_found() -> None:
    """Nothing takes time but the switches, and no device may idle."""
    free = replace(LONG, stall=0.0, work=((0.0, 0.0),), residence=(0.0, 0.0))
    training = (replace(ONE, seconds=0.0, publish=0.0),)
    problem = replace(PROBLEM, engines=(free,), training=training, staleness=0, colocated=True, switch=0.5)
    assert solve(replace(problem, use_all_devices=True)).predicted.step == 1.0


@settings(max_examples=50, deadline=None)
@given(problems())
def test_an_ample_step_is_ample_for_every_allocation(problem: Problem) -> None:
    assert max(plan.step for plan in priced(problem)) <= ample_step(problem)
    assert optimum(problem) <= ample_step(problem)
