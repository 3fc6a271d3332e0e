"""Engine work and residence against numbers worked out by hand, and against engines run iteration by iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost.device import EngineCost
from libra.cost.lines import IterationLine
from libra.cost.rollout import (
    EngineTiming,
    concurrency,
    measured_timing,
    prefill_seconds,
    refill_seconds,
    seats_taken,
    work,
)
from libra.lengths import TrajectoryClass

COST = EngineCost(step=0.01, per_sequence=0.001, per_context_token=1e-6, per_prefill_token=1e-4, per_turn=0.1)
TIMING = measured_timing(COST)
# Few sequences wait for weights to be read, many for arithmetic: the lines meet at 20 sequences.
TWO_LINES = replace(TIMING, lines=(*TIMING.lines, IterationLine(0.0, 0.0015, 1e-6)))
QUADRATIC = replace(TIMING, per_prefill_context=1e-7)
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
SILENT = replace(CLASS, generated=0.0, context_sum=0.0)


@pytest.mark.parametrize(
    ("max_num_seqs", "in_flight", "engines", "wanted"),
    [(8, 100, 4, 8), (64, 100, 4, 25), (64, 99, 4, 24), (64, 3, 4, 1), (1, 100, 1, 1)],
)
def test_concurrency(max_num_seqs: int, in_flight: int, engines: int, wanted: int) -> None:
    assert concurrency(max_num_seqs, in_flight, engines) == wanted


WORK = [
    # by seats (0.01 + 0.001) * 100, by memory 0.001 * 100 + 0.01 / 10000 * 50000; context 1e-6 * 50000, prefill
    # 1e-4 * 1000, turns 0.1 * 2
    ("one seat", TIMING, 1, 10_000, (1.1 + 0.35, 0.15 + 0.35)),
    ("ten seats", TIMING, 10, 10_000, (0.2 + 0.35, 0.15 + 0.35)),
    ("a quarter of the memory", TIMING, 10, 2_500, (0.2 + 0.35, 0.3 + 0.35)),
    # A full context is 450 tokens behind the average prefilled one: 1e-7 * 450 * 1000
    ("prefill that attends", QUADRATIC, 10, 10_000, (0.2 + 0.35 + 0.045, 0.15 + 0.35 + 0.045)),
    # 0.0015 * 100, whatever the seats
    ("two lines", TWO_LINES, 10, 10_000, (0.2 + 0.35, 0.15 + 0.35, 0.15 + 0.35, 0.15 + 0.35)),
]


@pytest.mark.parametrize(
    ("timing", "max_num_seqs", "kv_tokens", "wanted"), [w[1:] for w in WORK], ids=[w[0] for w in WORK]
)
def test_work(timing: EngineTiming, max_num_seqs: int, kv_tokens: int, wanted: tuple[float, ...]) -> None:
    assert work(timing, CLASS, max_num_seqs, kv_tokens) == pytest.approx(wanted)


def test_max_num_seqs_and_memory_ask_for_the_same_when_context_fills_the_max_num_seqs_exactly() -> None:
    by_max_num_seqs, by_memory = work(TIMING, CLASS, 10, 10 * 500)  # 500 tokens of context each
    assert by_max_num_seqs == pytest.approx(by_memory)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(100, 300),
    st.sampled_from([TIMING, TWO_LINES]),
)
def test_an_engine_never_takes_less_time_than_its_work(
    trajectories: list[tuple[int, int]], max_num_seqs: int, kv_tokens: int, timing: EngineTiming
) -> None:
    """Run each iteration of one engine that takes trajectories in order: as many as have a seat and memory to end."""
    waiting = [(prompt, prompt + generated) for prompt, generated in trajectories]
    running: list[list[int]] = []
    seconds = 0.0
    while waiting or running:
        while waiting and len(running) < max_num_seqs and sum(end for _, end in running) + waiting[0][1] <= kv_tokens:
            running.append(list(waiting.pop(0)))
        context = sum(length for length, _ in running)
        seconds += timing.iteration_seconds(len(running), context)
        for sequence in running:
            sequence[0] += 1
        running = [sequence for sequence in running if sequence[0] < sequence[1]]
    together = replace(
        CLASS,
        generated=float(sum(generated for _, generated in trajectories)),
        context_sum=float(
            sum(generated * prompt + generated * (generated - 1) / 2 for prompt, generated in trajectories)
        ),
        prefill=0.0,
        turns=0.0,
    )
    assert max(work(timing, together, max_num_seqs, kv_tokens)) <= seconds * (1 + 1e-9)


def test_prefilled_tokens_have_half_the_final_context_before_them() -> None:
    assert prefill_seconds(TIMING, CLASS) == pytest.approx(0.1)
    assert prefill_seconds(QUADRATIC, CLASS) == pytest.approx(0.1 + 1e-7 * 1000 * 450)


def test_a_refill_prefills_the_context_of_a_random_generated_token() -> None:
    assert refill_seconds(TIMING, CLASS) == pytest.approx(500 * 1e-4)
    assert refill_seconds(QUADRATIC, CLASS) == pytest.approx(500 * 1e-4 + 1e-7 * 500 * 500 / 2)
    assert refill_seconds(TIMING, SILENT) == 0.0


def test_no_more_sequences_decode_together_than_memory_holds() -> None:
    assert [seats_taken(CLASS, 64, kv) for kv in (10**9, 10 * 500, 1)] == [64, 10, 1]  # one always decodes
    assert seats_taken(SILENT, 64, 1) == 64


def test_the_slowest_line_counts() -> None:
    assert [TWO_LINES.iteration_seconds(count, 0.0) for count in (1, 20, 40)] == pytest.approx([0.011, 0.03, 0.06])
