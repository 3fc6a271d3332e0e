"""Nothing that is part of a plan is ever left out, and what is impossible for the devices is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.enumerate_problems import Priced, members, moves, priced, problems
from oracles.small_problem import LONG, ONE, PROBLEM

from libra.plan.model.ranges import NEVER, RangeTable
from libra.plan.model.relaxation import Candidate, Relaxation, cheapest_cover
from libra.plan.problem import Pool, Problem


def keeps(problem: Problem, candidate: Candidate, plan: Priced) -> bool:
    """Whether the candidate allows the plan's buckets, with training that takes no more devices and no more moves."""
    allocation = plan.allocation
    option = next(t for t in problem.training if (t.layout, t.replicas) == (allocation.layout, allocation.replicas))
    instead = replace(allocation, replicas=candidate.training.replicas, layout=candidate.training.layout)
    return (
        candidate.training.pool == option.pool
        and candidate.training.devices <= option.devices
        and (not problem.use_all_devices or candidate.training == option)
        and moves(problem, instead) <= plan.moves
        and all(
            candidate.engines[problem.shapes.index(bucket.shape), served[0], served[-1]] <= bucket.engines
            for bucket in allocation.buckets
            for served in [members(problem, bucket)]
        )
    )


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from([1 + 1e-6, 1.1, 2.0]), st.data())
def test_no_allocation_that_keeps_the_step_is_left_out(problem: Problem, factor: float, data: st.DataObject) -> None:
    plans = priced(problem)
    step = max(1e-6, factor * data.draw(st.sampled_from(plans)).step)
    table = RangeTable(problem, tried=problem.current is not None)
    candidates = list(Relaxation(problem, table).candidates(step))
    for plan in plans:
        if plan.step * (1 + 1e-9) <= step:
            assert any(keeps(problem, candidate, plan) for candidate in candidates)


@settings(max_examples=50, deadline=None)
@given(problems(), st.data())
def test_bounds_stay_valid_while_weights_change(problem: Problem, data: st.DataObject) -> None:
    """One relaxation is asked for many steps, and keeps the weights of pools that it found."""
    plans = priced(problem)
    relaxation = Relaxation(problem, RangeTable(problem, tried=problem.current is not None))
    for asked in data.draw(st.lists(st.sampled_from(plans), min_size=2, max_size=6)):
        step = max(1e-6, asked.step * (1 + 1e-6))
        assert any(keeps(problem, candidate, asked) for candidate in relaxation.candidates(step))


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([1 + 1e-6, 1.1, 2.0]), st.data())
def test_no_plan_with_as_few_devices_is_left_out(problem: Problem, factor: float, data: st.DataObject) -> None:
    problem = replace(problem, current=None)
    plans = priced(problem)
    step = max(1e-6, factor * data.draw(st.sampled_from(plans)).step)
    relaxation = Relaxation(problem, RangeTable(problem, tried=False))
    candidates = list(relaxation.candidates(step))
    within = [plan for plan in plans if plan.step * (1 + 1e-9) <= step]
    if not within:
        return
    most = data.draw(st.sampled_from(sorted({plan.devices for plan in within})))
    assert min(map(relaxation.least_devices, candidates)) <= min(plan.devices for plan in within)
    left = relaxation.with_devices(candidates, most)
    for plan in within:
        if plan.devices <= most:
            assert any(keeps(problem, candidate, plan) for candidate in left)


def test_a_range_that_would_take_devices_from_the_others_is_left_out() -> None:
    """Within 9.5 s a long engine for the long class takes 2 of the 7 devices; 5 are left for the short class."""
    small = replace(PROBLEM, pools=(Pool("a", 1, 4),), training=(ONE,))
    table = RangeTable(small, tried=False)
    assert table.engines(ONE, 9.5)[0, 0, 0] == 2  # short engines for the short class: one device too many
    assert not list(Relaxation(small, table).candidates(9.5))
    candidates = list(Relaxation(PROBLEM, RangeTable(PROBLEM, tried=False)).candidates(9.5))
    assert [candidate.training for candidate in candidates] == [ONE]
    assert candidates[0].engines.tolist() == [[[2, NEVER], [NEVER, NEVER]], [[2, 2], [NEVER, 1]]]


def test_devices_of_one_pool_do_not_stand_in_for_another_s() -> None:
    """Eight devices in all, but long engines would need four of a pool that has three."""
    pools = (Pool("a", 1, 5), Pool("b", 1, 3))
    problem = replace(PROBLEM, pools=pools, engines=(replace(LONG, pool="b", devices=1),), training=(ONE,))
    assert any(Relaxation(problem, RangeTable(problem, tried=False)).candidates(20.0))
    slow = replace(problem, engines=(replace(LONG, pool="b", devices=1, work=((40.0, 40.0),)),))
    assert not list(Relaxation(slow, RangeTable(slow, tried=False)).candidates(20.0))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 4), st.data())
def test_the_cheapest_cover_is_the_cheapest(classes: int, shapes: int, most: int, data: st.DataObject) -> None:
    counts = st.sampled_from([1, 2, 3, 5, NEVER])
    engines = np.full((shapes, classes, classes), NEVER, dtype=np.int64)
    for s, i, j in np.argwhere(np.triu(np.ones((classes, classes), dtype=bool))[None].repeat(shapes, 0)):
        engines[s, i, j] = data.draw(counts)
    weights = np.array(data.draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=shapes, max_size=shapes)))
    best = min(
        sum(min(int(engines[s, i, j]) * weights[s] for s in range(shapes)) for i, j in cover)
        for cover in _covers(0, classes, most)
    )
    cover = cheapest_cover(engines, weights, most)
    assert [i for _, i, _ in cover] == [0, *(j + 1 for _, _, j in cover[:-1])]
    assert cover[-1][2] == classes - 1 and len(cover) <= most
    cost = sum(int(engines[cell]) * weights[cell[0]] for cell in cover)
    assert cost == best if best < NEVER else any(engines[cell] == NEVER for cell in cover)


def _covers(first: int, classes: int, most: int) -> list[list[tuple[int, int]]]:
    if first == classes:
        return [[]]
    if most == 0:
        return []
    return [
        [(first, last), *others] for last in range(first, classes) for others in _covers(last + 1, classes, most - 1)
    ]
