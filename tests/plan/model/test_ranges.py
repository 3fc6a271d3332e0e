"""The fewest engines for every range, against the oracle's price of that many engines and of one less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.enumerate_problems import bucket_step, priced, problems
from oracles.small_problem import LONG, ONE, PROBLEM

from libra.plan.allocation import Bucket
from libra.plan.model.ranges import NEVER, RangeTable
from libra.plan.options.price import fixed_seconds
from libra.plan.problem import Problem, TrainingOption

MOST = 6  # engines that the oracle tries

Range = tuple[int, int, int]


def existing(problem: Problem) -> Iterator[tuple[Range, Bucket]]:
    """The ranges (shape, first, last) that a bucket can have, each with a bucket of one engine."""
    peaks = problem.peaks
    for s, shape in enumerate(problem.shapes):
        for first in range(len(peaks)):
            for last in range(first, len(peaks)):
                above = peaks[first - 1] if first else 0
                up_to = problem.longest_context if last == len(peaks) - 1 else peaks[last]
                parts_equals = (first and peaks[first] == above) or (last + 1 < len(peaks) and peaks[last + 1] == up_to)
                if not parts_equals and up_to <= problem.footprint(shape)[2]:
                    yield (s, first, last), Bucket(shape, 1, above, up_to)


def fewest(problem: Problem, bucket: Bucket, training: TrainingOption, step: float, tried: bool, begin: str) -> int:
    """At most MOST engines, or one more where these do not keep the step."""
    engines = (replace(bucket, engines=n) for n in range(1, MOST + 1))
    kept = (it.engines for it in engines if bucket_step(problem, it, training, tried, begin) <= step)
    return next(kept, MOST + 1)


@settings(max_examples=100, deadline=None)
@given(problems(), st.booleans(), st.data())
def test_the_table_holds_the_fewest_engines(problem: Problem, tried: bool, data: st.DataObject) -> None:
    """Steps are those of some allocation, or just beside them, where one engine more or less is needed."""
    near = data.draw(st.sampled_from(priced(problem))).step * data.draw(st.sampled_from([0.5, 1 - 1e-6, 1 + 1e-6, 2.0]))
    step = max(near, 1e-6)
    training = data.draw(st.sampled_from(problem.training))
    begin = data.draw(st.integers(0, len(problem.shapes) - 1))
    shape = problem.shapes[begin]
    table = RangeTable(problem, tried).engines(training, step, begin)
    buckets = {cell: it for cell, it in existing(problem) if cell[1] > 0 or it.shape == shape}
    for cell in ((s, i, j) for s, row in enumerate(table) for i, line in enumerate(row) for j, _ in enumerate(line)):
        if cell in buckets:
            # A step so close to one that some number of engines just keeps may be told either way.
            least = fewest(problem, buckets[cell], training, step * (1 + 1e-8), tried, shape)
            most = fewest(problem, buckets[cell], training, step * (1 - 1e-8), tried, shape)
            assert least <= min(table[cell], MOST + 1) <= most
        else:
            assert table[cell] == NEVER


@settings(max_examples=50, deadline=None)
@given(problems(), st.booleans(), st.integers(1, MOST))
def test_a_step_that_is_just_kept_never_misses_an_engine(problem: Problem, tried: bool, engines: int) -> None:
    """Where a step has no time but for its latency nothing can be counted, so the step is a little longer."""
    for training in problem.training[:2]:
        for cell, bucket in existing(problem):
            begin = 0 if bucket.above else cell[0]
            shape = problem.shapes[begin]
            step = bucket_step(problem, replace(bucket, engines=engines), training, tried, shape) * (1 + 1e-12)
            if step > 0 and problem.staleness > 0:
                unstalled = min(o.stall for o in problem.engines if o.shape == bucket.shape) < step * (1 - 1e-9)
                assert RangeTable(problem, tried).engines(training, step, begin)[cell] <= engines or not unstalled


@settings(max_examples=50, deadline=None)
@given(problems(), st.booleans(), st.data())
def test_no_begin_asks_for_fewer_engines_than_the_best(problem: Problem, tried: bool, data: st.DataObject) -> None:
    step = max(1e-6, data.draw(st.sampled_from(priced(problem))).step)
    training = data.draw(st.sampled_from(problem.training))
    table = RangeTable(problem, tried)
    for begin in range(len(problem.shapes)):
        assert (table.engines(training, step) <= table.engines(training, step, begin)).all()


@settings(max_examples=50, deadline=None)
@given(problems(), st.floats(0.1, 30.0))
def test_training_options_of_a_higher_rank_ask_for_no_more(problem: Problem, step: float) -> None:
    table = RangeTable(problem, tried=False)
    ranks = table.ranks(np.array([fixed_seconds(problem, option) for option in problem.training]), step)
    for one, rank in zip(problem.training, ranks, strict=True):
        for other, its in zip(problem.training, ranks, strict=True):
            if rank <= its:
                for begin in (None, *range(len(problem.shapes))):
                    assert (table.engines(one, step, begin) >= table.engines(other, step, begin)).all()


# Routers (1, 0.5) and (0.5, 0); the first bucket's work as in the tests of the price.
COUNTS = [
    # short for class 0: 18 / (9.5 - 0.5) with 8 seats; long: 5 + 10 / (9.5 - 1), and for class 1: 5 / 8.5
    (9.5, [[[2, NEVER], [NEVER, NEVER]], [[2, 2], [NEVER, 1]]]),
    # Class 1 takes (10 + 9) / 2 = 9.5 wherever it is, and some of it is wherever class 0 is
    (9.4, [[[NEVER, NEVER], [NEVER, NEVER]], [[NEVER, NEVER], [NEVER, NEVER]]]),
]
# On short engines class 1 takes 2 s less than on long ones, and less where only some of its work is there.
UNEVEN = replace(
    PROBLEM, engines=(*(replace(it, residence=(it.residence[0], 8.0)) for it in PROBLEM.engines[:2]), LONG)
)
BEGUN = [
    # Of routers (1, 0.5) and (0.5, 0) the first brings more of class 1 to long, (0.5 * 10 + 0.5 * 8 + 9) / 2 = 9;
    # short ones with 8 seats have 18 s of work
    (8.9, 0, [[[3, NEVER], [NEVER, NEVER]], [[NEVER, NEVER], [NEVER, NEVER]]]),
    (9.1, 0, [[[3, NEVER], [NEVER, NEVER]], [[NEVER, NEVER], [NEVER, 1]]]),
    # All of it on long engines takes 9.5 s
    (9.1, 1, [[[NEVER, NEVER], [NEVER, NEVER]], [[NEVER, NEVER], [NEVER, NEVER]]]),
]


@pytest.mark.parametrize(("step", "begin", "wanted"), BEGUN)
def test_counts_by_the_shape_of_the_first_range(step: float, begin: int, wanted: list[list[list[int]]]) -> None:
    assert RangeTable(UNEVEN, tried=False).engines(ONE, step, begin).tolist() == wanted


@pytest.mark.parametrize(("step", "wanted"), COUNTS)
def test_known_counts(step: float, wanted: list[list[list[int]]]) -> None:
    assert RangeTable(PROBLEM, tried=False).engines(ONE, step).tolist() == wanted
