"""Engine work and residence against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from libra.cost.device import EngineCost
from libra.cost.rollout import concurrency, residence, work_by_memory, work_by_seats
from libra.lengths import TrajectoryClass

COST = EngineCost(step=0.01, per_sequence=0.001, per_context_token=1e-6, per_prefill_token=1e-4, per_turn=0.1)
CLASS = TrajectoryClass(
    share=1.0,
    peak_context=1000,
    generated=100.0,
    context_sum=50_000.0,
    prefill=1000.0,
    turns=2.0,
    tool_seconds=3.0,
    before_first_return=0.6,
)


@pytest.mark.parametrize(
    ("max_num_seqs", "in_flight", "engines", "wanted"),
    [(8, 100, 4, 8), (64, 100, 4, 25), (64, 99, 4, 24), (64, 3, 4, 1), (1, 100, 1, 1)],
)
def test_concurrency(max_num_seqs: int, in_flight: int, engines: int, wanted: int) -> None:
    assert concurrency(max_num_seqs, in_flight, engines) == wanted


@pytest.mark.parametrize(
    ("seats", "wanted"),
    [
        (1, 1.1 + 0.05 + 0.1 + 0.2),  # (0.01 + 0.001) * 100, 1e-6 * 50000, 1e-4 * 1000, 0.1 * 2
        (10, 0.2 + 0.05 + 0.1 + 0.2),
    ],
)
def test_work_by_seats(seats: int, wanted: float) -> None:
    assert work_by_seats(COST, CLASS, seats) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("kv_tokens", "wanted"),
    [
        (10_000, 0.1 + 0.1 + 0.1 + 0.2),  # 0.001 * 100, (0.01 / 10000 + 1e-6) * 50000, 1e-4 * 1000, 0.1 * 2
        (2_500, 0.1 + 0.25 + 0.1 + 0.2),
    ],
)
def test_work_by_memory(kv_tokens: int, wanted: float) -> None:
    assert work_by_memory(COST, CLASS, kv_tokens) == pytest.approx(wanted)


def test_seats_and_memory_ask_for_the_same_when_context_fills_the_seats_exactly() -> None:
    mean_context = CLASS.context_sum / CLASS.generated
    assert work_by_seats(COST, CLASS, 10) == pytest.approx(work_by_memory(COST, CLASS, int(10 * mean_context)))


@pytest.mark.parametrize("seats", [1, 10, 64])
def test_residence_is_iterations_at_the_mean_context(seats: int) -> None:
    iteration = COST.iteration_seconds(seats, seats * CLASS.context_sum / CLASS.generated)
    assert residence(COST, CLASS, seats) == pytest.approx(CLASS.generated * iteration + 0.1 + 0.2 + 3.0)


def test_residence_of_a_class_that_generates_nothing() -> None:
    silent = replace(CLASS, generated=0.0, context_sum=0.0)
    assert residence(COST, silent, 10) == pytest.approx(0.1 + 0.2 + 3.0)
