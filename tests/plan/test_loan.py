"""Split and loan in one solve: as good as brute force says, weighed by what traffic may take away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.enumerate_problems import optimum, priced, problems, step_of
from oracles.optimality import require_agreement

from libra.plan.allocation import Allocation, Bucket
from libra.plan.decision import expected
from libra.plan.loan import loan_cases, solve_loans, without
from libra.plan.model.solve import STEP_TOLERANCE, solve
from libra.plan.options.menu import Availability, Menu
from libra.plan.problem import EngineOption, Pool, Problem, TrainingOption

_MOST = 1500  # allocations, for brute force


@st.composite
def lending(draw: st.DrawFn) -> Problem:
    """A small problem with a pool that lends engines like one's own, slower, and not for the longest contexts."""
    own = replace(draw(problems(small=True)), current=None)
    assume(own.longest_context > 1)
    pool = Pool("lent", draw(st.integers(1, 3)), 1, serves=True)
    lent: list[EngineOption] = []
    for number in range(draw(st.integers(1, 2))):
        share = draw(st.sampled_from([0.25, 0.5, 0.75, 1.0]))
        lent += [
            replace(
                option,
                shape=f"lent-{number}",
                pool="lent",
                devices=1,
                holds=own.longest_context - 1,
                stall=option.stall / share,
                work=tuple(_slower(row, share) for row in option.work),
                refresh=_slower(option.refresh, share),
                residence=_slower(option.residence, share),
                generates=tuple(_slower(row, share) for row in option.generates),
            )
            for option in own.engines
            if option.shape == own.engines[0].shape
        ]
    most = min(own.most_buckets or 2, 2)
    return replace(own, pools=(*own.pools, pool), engines=(*own.engines, *lent), most_buckets=most)


def _slower(row: tuple[float, ...], share: float) -> tuple[float, ...]:
    return tuple(seconds / share for seconds in row)


@settings(max_examples=30, deadline=None)
@given(lending())
def test_both_formulations_decide_split_and_loan_as_brute_force_does(problem: Problem) -> None:
    if len(priced(problem)) <= _MOST:
        require_agreement(problem)


@settings(max_examples=30, deadline=None)
@given(lending(), st.sampled_from([0.1, 0.4, 0.9]), st.data())
def test_on_average_no_loan_costs_more_than_none_and_no_step_is_below_the_bound(
    problem: Problem, away: float, data: st.DataObject
) -> None:
    gone = data.draw(st.sets(st.sampled_from(sorted(problem.lent)), min_size=1))
    menu = Menu(problem, availability=(Availability(frozenset(gone), away), Availability(frozenset(), 1 - away)))
    found = solve_loans(menu, solve)
    average = _average(menu, found.allocation)
    assert expected(loan_cases(menu), found.allocation).step == pytest.approx(average)
    alone = optimum(without(problem, problem.lent))
    assert average <= alone * (1 + 2 * STEP_TOLERANCE) + 1e-6
    seeing = (1 - away) * optimum(problem) + away * optimum(without(problem, gone))  # if one knew beforehand
    assert average >= seeing * (1 - 1e-9)


def _average(menu: Menu, allocation: Allocation) -> float:
    """By the oracle: buckets whose engines are away are served by the next longer one."""
    total = 0.0
    for case in menu.availability:
        left: list[Bucket] = []
        for bucket in allocation.buckets:
            if bucket.shape not in case.away:
                left.append(replace(bucket, above=left[-1].up_to if left else 0))
        total += case.probability * step_of(menu.problem, replace(allocation, buckets=tuple(left)))
    return total


def engine(shape: str, pool: str, work: tuple[float, float], holds: int) -> EngineOption:
    return EngineOption(shape, pool, 1, 8, holds, 0.0, (work,), (0.0, 0.0), (0.0, 0.0))


EVERY = ((1.0, 1.0),)
# Three devices of one's own: one trains in 8 s, and two generate for 16 s. With two that are lent, two train in 4 s:
# the lent ones take 5 s for the short trajectories, and one of one's own 4 s for the long, or 16 s for all.
PROBLEM = Problem(
    pools=(Pool("own", 3, 1), Pool("chat", 2, 1, serves=True)),
    engines=(engine("own", "own", (12.0, 4.0), 100), engine("chat", "chat", (10.0, 10.0), 99)),
    training=tuple(TrainingOption("t", "own", n, n, 8.0 / n, 0.0) for n in (1, 2)),
    peaks=(10, 100),
    expected=(True, True),
    longest_context=100,
    recall_known=EVERY,
    recall_possible=EVERY,
    staleness=1,
)


def cases(away: float) -> Menu:
    found = (Availability(frozenset(), 1 - away), Availability(frozenset({"chat"}), away))
    return Menu(PROBLEM, availability=tuple(sorted(found, key=lambda it: -it.probability)) if away else found[:1])


@pytest.mark.parametrize(("away", "borrows"), [(0.0, True), (0.1, True), (0.5, False), (1.0, False)])
def test_a_loan_is_taken_as_long_as_it_pays_on_average(away: float, borrows: bool) -> None:
    found = solve_loans(cases(away), solve)
    shapes = [bucket.shape for bucket in found.allocation.buckets]
    assert ("chat" in shapes) is borrows
    assert found.predicted.step == (5.0 if borrows else 8.0)
    assert expected(loan_cases(cases(away)), found.allocation).step == (5.0 + 11.0 * away if borrows else 8.0)


def test_a_loan_that_helps_nobody_is_not_taken() -> None:
    slow = replace(PROBLEM, engines=(PROBLEM.engines[0], engine("chat", "chat", (100.0, 100.0), 99)))
    assert "chat" not in [bucket.shape for bucket in solve_loans(Menu(slow), solve).allocation.buckets]


@pytest.mark.parametrize(("work", "borrows"), [(15.92, False), (15.8, True)])
def test_a_loan_that_gains_less_than_prices_tell_apart_is_not_taken(work: float, borrows: bool) -> None:
    little = replace(PROBLEM, engines=(PROBLEM.engines[0], engine("chat", "chat", (work, work), 99)))
    found = solve_loans(Menu(little), solve)
    assert ("chat" in [bucket.shape for bucket in found.allocation.buckets]) is borrows
    assert found.predicted.step == (work / 2 if borrows else 8.0)
    assert found.proof.status == "optimal"
    assert found.proof.bound == pytest.approx(work / 2, rel=2e-4)  # what is known to be possible is still said


def allocation(*buckets: tuple[str, int]) -> Allocation:
    return Allocation(1, tuple(_buckets(buckets)), "t")


def _buckets(buckets: tuple[tuple[str, int], ...]) -> Iterator[Bucket]:
    above = 0
    for shape, up_to in buckets:
        yield Bucket(shape, 1, above, up_to)
        above = up_to


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (allocation(("a", 10), ("b", 20)), allocation(("a", 10), ("b", 20))),
        (allocation(("x", 10), ("b", 20)), allocation(("b", 20))),
        (allocation(("a", 10), ("x", 15), ("b", 20)), allocation(("a", 10), ("b", 20))),
        (allocation(("x", 10), ("x", 15), ("b", 20)), allocation(("b", 20))),
        (allocation(("a", 10), ("x", 20)), allocation(("a", 10))),
        (allocation(("x", 20)), allocation()),
    ],
)
def test_what_is_left_when_lent_engines_are_away(before: Allocation, after: Allocation) -> None:
    assert before.without({"x"}) == after


def test_nobody_lends_engines_for_the_longest_contexts() -> None:
    with pytest.raises(ValueError, match="chat/8 is lent and holds the longest context of 100 tokens"):
        replace(PROBLEM, engines=(PROBLEM.engines[0], engine("chat", "chat", (1.0, 1.0), 100)))


def test_nothing_trains_where_users_are_served() -> None:
    with pytest.raises(ValueError, match="t trains on pool chat, which serves users: train on another"):
        replace(PROBLEM, training=(TrainingOption("t", "chat", 1, 1, 8.0, 0.0),))
