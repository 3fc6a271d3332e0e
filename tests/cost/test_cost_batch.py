"""Price of a batch that starts at once: parts by hand, and against engines run iteration by iteration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost.corrections import UNCORRECTED, BatchFactors
from libra.cost.device import EngineCost
from libra.cost.grid import EngineGrid
from libra.cost.lines import IterationLine
from libra.cost.rollout import (
    EngineTiming,
    batch_work,
    measured_timing,
    refill_seconds,
    refills,
    secant_timings,
)
from libra.lengths import TrajectoryClass

COST = EngineCost(step=0.01, per_sequence=0.001, per_context_token=1e-6, per_prefill_token=1e-4, per_turn=0.1)
TIMING = measured_timing(COST)
CLASS = TrajectoryClass(
    share=1.0,
    peak_context=1000,
    mean_context=900.0,
    generated=100.0,
    context_sum=50_000.0,
    prefill=1000.0,
    turns=2.0,
    tool_seconds=3.0,
    before_first_return=0.6,
)
NO_TOOLS = replace(CLASS, tool_seconds=0.0)
KV = 10_000

PARTS = [
    # Decoding 0.001 * 100 + 1e-6 * 50000; what reads weights for want of memory 0.01 * 50000 / 10000; prefill 1e-4 *
    # 1000 and two turns 0.1 * 2
    ("all of it", NO_TOOLS, UNCORRECTED, 0.15 + 0.05 + 0.3),
    ("decoding", NO_TOOLS, replace(UNCORRECTED, decode=2.0), 0.3 + 0.05 + 0.3),
    ("memory", NO_TOOLS, replace(UNCORRECTED, memory=0.0), 0.15 + 0.3),
    ("prefill", NO_TOOLS, replace(UNCORRECTED, prefill=0.5), 0.15 + 0.05 + 0.25),
]


@pytest.mark.parametrize(("cls", "factors", "wanted"), [row[1:] for row in PARTS], ids=[r[0] for r in PARTS])
def test_work_of_a_batch(cls: TrajectoryClass, factors: BatchFactors, wanted: float) -> None:
    assert batch_work(TIMING, cls, KV, factors) == pytest.approx((wanted,))


def test_a_context_that_is_gone_is_prefilled_again_by_each_turn_after_the_first() -> None:
    assert refill_seconds(TIMING, CLASS) == pytest.approx(0.05)
    assert refills(TIMING, CLASS, replace(UNCORRECTED, eviction=3.0)) == pytest.approx(3 * 0.05)
    assert refills(TIMING, replace(CLASS, turns=1.0), UNCORRECTED) == 0.0


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_one_engine_takes_its_batch_exactly_as_long_as_work_and_the_longest(
    trajectories: list[tuple[int, int]], weights: int
) -> None:
    """All start at once, none has a tool, memory is ample: there are as many iterations as the longest has tokens."""
    timing = EngineTiming((IterationLine(0.01 * weights, 0.001, 1e-6),), 0.0, 0.0, 0.0)
    running = [[prompt, prompt + generated] for prompt, generated in trajectories]
    seconds = 0.0
    while running:
        seconds += timing.iteration_seconds(len(running), sum(length for length, _ in running))
        for sequence in running:
            sequence[0] += 1
        running = [sequence for sequence in running if sequence[0] < sequence[1]]
    classes = [
        replace(
            NO_TOOLS,
            peak_context=prompt + generated,
            generated=float(generated),
            context_sum=float(generated * prompt + generated * (generated - 1) / 2),
            prefill=0.0,
            turns=1.0,
        )
        for prompt, generated in trajectories
    ]
    factors = replace(UNCORRECTED, memory=0.0)
    work = sum(batch_work(timing, cls, KV, factors)[0] for cls in classes)
    own = max(classes, key=lambda cls: cls.generated)
    # The longest's own share of the work is in both.
    alone = own.generated * timing.iteration_seconds(1, own.context_sum / own.generated)
    alone += timing.per_turn * own.turns - batch_work(timing, own, KV, factors)[0]
    assert work + alone == pytest.approx(seconds)


CONCAVE = EngineGrid(
    tp=1,
    batches=(1, 8, 64, 512),
    contexts=(100, 10_000),
    decode=tuple((math.sqrt(b), math.sqrt(b) + b * 0.099) for b in (1, 8, 64, 512)),
    chunks=(16, 64),
    prefixes=(0, 1000),
    prefill=((1.0, 1.0), (1.0, 1.0)),
)


def test_secants_meet_a_concave_grid_at_their_ends() -> None:
    below = EngineTiming((IterationLine(0.9, 0.01, 1e-5),), 0.0, 0.0, 0.0)
    found = secant_timings(below, CONCAVE, 512, (100.0, 10_000.0))
    assert len(found) == 3
    for timing, (low, high) in zip(found, ((64, 512), (8, 64), (1, 8)), strict=True):
        assert timing.lines[:-1] == below.lines
        for batch in (low, high):
            assert timing.iteration_seconds(batch, batch * 100) == pytest.approx(CONCAVE.decode_seconds(batch, 100))
    # The cheapest is near everywhere.
    for batch in (1, 4, 8, 30, 64, 300, 512):
        cheapest = min(timing.iteration_seconds(batch, batch * 100) for timing in found)
        assert cheapest == pytest.approx(CONCAVE.decode_seconds(batch, 100), rel=0.3)


def test_where_lines_are_near_there_are_no_secants() -> None:
    linear = replace(CONCAVE, decode=tuple((0.5 + 0.01 * b, 0.5 + 0.02 * b) for b in CONCAVE.batches))
    below = EngineTiming((IterationLine(0.5, 0.0099, 1e-6),), 0.0, 0.0, 0.0)
    assert secant_timings(below, linear, 512, (100.0, 10_000.0)) == (below,)
