"""Several periods at once, against every sequence there is."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_problem import problem_of

from libra.plan.allocation import Allocation, Bucket
from libra.plan.model.horizon import PoolSizes, optima, plan_horizon, shortest_path
from libra.plan.options.price import infeasibility, price
from libra.plan.problem import EngineOption, InfeasiblePlanError, Pool, Problem, TrainingOption

DEVICES = 5


def make_problem(work: float, train: float) -> Problem:
    """Of five devices, one replica or more train for `train / replicas` seconds; the others generate for `work` over
    their number."""
    return problem_of(
        pools=(Pool("pool", 1, DEVICES),),
        engines=(EngineOption("engine", "pool", 1, 4, 1000, 0.0, ((work,),), (0.0,), (0.0,)),),
        training=tuple(TrainingOption("layout", "pool", n, n, train / n, 0.0) for n in range(1, DEVICES)),
        peaks=(1000,),
        staleness=7,
    )


def split(replicas: int) -> Allocation:
    return Allocation(replicas, (Bucket("engine", DEVICES - replicas, 0, 1000),), "layout")


def restarts(problem: Problem, current: Allocation, wanted: Allocation) -> float:
    """Ten seconds for each engine and each replica that starts."""
    engines = (wanted.engines_by_shape - current.engines_by_shape).total()
    return 10.0 * (engines + max(0, wanted.replicas - current.replicas))


def total(problems: list[Problem], steps: list[int], path: tuple[Allocation, ...], start: Allocation | None) -> float:
    came = [start or path[0], *path[:-1]]
    return sum(
        price(problem, here).step * count + restarts(problem, before, here)
        for problem, count, before, here in zip(problems, steps, came, path, strict=True)
    )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1, 40), st.floats(1, 40), st.integers(1, 20)), min_size=1, max_size=3),
    st.sampled_from([None, split(1), split(3)]),
)
def test_no_sequence_of_candidates_takes_less_time(
    periods: list[tuple[float, float, int]], current: Allocation | None
) -> None:
    problems = [make_problem(work, train) for work, train, _ in periods]
    steps = [count for _, _, count in periods]
    splits = [split(n) for n in range(1, DEVICES)]
    found = plan_horizon(problems, steps, restarts, current, candidates=splits)
    everything = dict.fromkeys([*splits, *optima(problems, current)])
    best = min(total(problems, steps, path, current) for path in product(everything, repeat=len(problems)))
    assert found.seconds == pytest.approx(best)
    assert found.seconds == pytest.approx(total(problems, steps, found.allocations, current))
    assert found.step_seconds == tuple(
        pytest.approx(price(problem, each).step) for problem, each in zip(problems, found.allocations, strict=True)
    )


@given(st.data())
def test_shortest_path_against_all_paths(data: st.DataObject) -> None:
    candidates, periods = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    seconds = st.one_of(st.integers(0, 9).map(float), st.just(math.inf))
    held = [[data.draw(seconds) for _ in range(candidates)] for _ in range(periods)]
    lost = [[[data.draw(st.integers(0, 9)) for _ in range(candidates)] for _ in range(candidates)] for _ in held]
    start = data.draw(st.sampled_from([None, *range(candidates)]))

    def length(path: tuple[int, ...]) -> float:
        came = [path[0] if start is None else start, *path[:-1]]
        moves = sum(lost[p][a][b] for p, (a, b) in enumerate(zip(came, path, strict=True)) if a != b)
        return moves + sum(held[p][b] for p, b in enumerate(path))

    best = min(length(path) for path in product(range(candidates), repeat=periods))
    if best == math.inf:
        with pytest.raises(InfeasiblePlanError, match="no sequence"):
            shortest_path(held, lambda p, a, b: lost[p][a][b], start)
    else:
        assert length(shortest_path(held, lambda p, a, b: lost[p][a][b], start)) == best


def test_a_change_is_made_when_its_gain_over_all_periods_pays() -> None:
    """Two devices instead of one train in 12 s instead of 24 s; the change costs 10 s for the replica."""
    problems = [make_problem(12.0, 24.0)] * 2
    assert plan_horizon(problems, [1, 1], restarts, split(1)).allocations[0] != split(1)
    dear = plan_horizon(problems, [1, 1], lambda *change: 100.0, split(1))
    assert dear.allocations == (split(1), split(1))
    assert dear.switch_seconds == (0.0, 0.0)
    assert dear.seconds == 48.0


def test_the_training_of_another_period_may_be_the_better_compromise() -> None:
    """Best alone are 1 and 4 replicas; where changing is dear, one of them is held in both periods."""
    problems = [make_problem(40.0, 10.0), make_problem(10.0, 40.0)]
    alone = optima(problems, None)
    assert {each.replicas for each in alone} == {1, 4}
    held = plan_horizon(problems, [1, 10], lambda *change: 1e6)
    assert [each.replicas for each in held.allocations] == [4, 4]


def test_each_period_is_also_solved_with_the_training_of_the_others() -> None:
    """With the first period's one replica the second trains for 40 s, in which one engine does all that there is."""
    found = optima([make_problem(40.0, 10.0), make_problem(10.0, 40.0)], None)
    assert {(each.replicas, each.engines) for each in found} == {(1, 4), (4, 1), (1, 1)}


def test_a_period_is_not_solved_with_a_training_that_it_has_no_devices_for() -> None:
    """The second period has two devices, and the first one trains on four."""
    large, small = make_problem(10.0, 40.0), replace(make_problem(40.0, 10.0), pools=(Pool("pool", 1, 2),))
    found = optima([large, small], None)
    assert [each.replicas for each in found if infeasibility(large, each) is None] == [4, 1]
    assert [each.replicas for each in found if infeasibility(small, each) is None] == [1]


def test_pool_sizes_count_what_trains_always_sometimes_and_never() -> None:
    problems = [make_problem(40.0, 40.0), make_problem(10.0, 40.0)]
    found = plan_horizon(problems, [10, 10], lambda *change: 0.0)
    replicas = [each.replicas for each in found.allocations]
    assert replicas[0] < replicas[1]
    assert found.pools == (PoolSizes("pool", replicas[0], replicas[1] - replicas[0], DEVICES - replicas[1]),)


def test_what_does_not_fit_a_period_is_not_held_in_it() -> None:
    whole = make_problem(12.0, 24.0)
    smaller = replace(whole, pools=(Pool("pool", 1, DEVICES - 1),))
    found = plan_horizon([whole, smaller], [1, 1], lambda *change: 1e6)
    assert infeasibility(smaller, found.allocations[1]) is None
    assert infeasibility(whole, found.allocations[0]) is None


@pytest.mark.parametrize(
    ("periods", "steps", "message"),
    [(0, [], "0 problems for 0 periods"), (2, [1], "2 problems for 1 periods"), (1, [0], "1 step or more")],
)
def test_bad_periods_are_refused(periods: int, steps: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_horizon([make_problem(1.0, 1.0)] * periods, steps, restarts)
