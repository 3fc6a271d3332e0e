"""What the naive engine does, in cases small enough to follow by hand, and what holds of every trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.naive_engine import NaiveResult, Step, naive_run

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Chain, Request
from tests.oracles.fidelity.random_workloads import random_case


class Ticks:
    """Every iteration takes one tick, and what was asked of the cost is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def decode(self, sequences: int, context: int) -> int:
        self.asked.append((sequences, context))
        return 1

    def mixed(self, sequences: int, context: int, chunks: list[tuple[int, int]]) -> int:
        self.asked.append((sequences, context, *chunks))
        return 1


class Weighed:
    """Iterations of different lengths, so that arrivals and cancellations fall inside some."""

    def decode(self, sequences: int, context: int) -> int:
        return 3 + sequences

    def mixed(self, sequences: int, context: int, chunks: list[tuple[int, int]]) -> int:
        return 4 + sequences + sum(new for new, _ in chunks)


def small(**changes: object) -> EngineConfig:
    """Blocks of 4 tokens, 5 of them, 8 tokens in an iteration."""
    settings: dict[str, object] = {
        "max_model_len": 20,
        "kv_blocks": 5,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
    }
    return EngineConfig(**(settings | changes))  # type: ignore[arg-type]


def roomy(**changes: object) -> EngineConfig:
    """More than enough of everything but what is told."""
    return small(**({"max_model_len": 64, "kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64} | changes))


def line(step: Step) -> str:
    words = [f"{step.start}:", *(f"{number}+{new}" for number, new in step.scheduled)]
    words += [f"out {number}" for number in step.preempted]
    words += [f"hit {number}:{tokens}" for number, tokens in step.cached if tokens]
    words += [f"done {number}" for number in step.finished]
    return " ".join([*words, f"free {step.free_blocks}"])


def trace(result: NaiveResult) -> list[str]:
    return [line(step) for step in result.steps]


PROMPT = Chain("prompt")
LEFT, RIGHT, OTHER = Chain("left", PROMPT, 8), Chain("right", PROMPT, 8), Chain("other")


def test_a_trace_to_read() -> None:
    """Two samples of a prompt, a short request beside them, and the prompt once more when all is over."""
    requests = [
        Request(0, 0, 9, 6, chain=LEFT),
        Request(1, 0, 9, 6, chain=RIGHT),
        Request(2, 3, 3, 2),
        Request(3, 9, 8, 1, chain=PROMPT),
    ]
    result = naive_run(small(), Ticks(), requests)
    assert trace(result) == [
        "0: 0+8 free 3",  # the budget cuts the prompt
        "1: 0+1 1+1 hit 1:8 free 1",  # the other sample uses the prompt's two blocks
        "2: 0+1 1+1 free 1",
        "3: 0+1 1+1 2+3 free 0",
        "4: 0+1 1+1 2+1 done 2 free 0",
        "5: 0+1 out 1 free 1",  # both need a block, and one is free: the last admitted goes
        "6: 0+1 done 0 free 1",
        "7: 1+1 hit 1:12 free 1",  # its own block was not overwritten either, so one token is left to compute
        "8: 1+1 done 1 free 1",
        "9: 3+4 hit 3:4 done 3 free 3",  # all of the prompt is there, and its last block is computed again
    ]
    assert result.times == {0: (2, 7), 1: (2, 9), 2: (4, 5), 3: (10, 10)}
    assert result.cached == {0: 0, 1: 8, 2: 0, 3: 4}
    assert result.preemptions == {0: 0, 1: 1, 2: 0, 3: 0}
    assert set(result.statuses.values()) == {"finished"}


SCHEDULES = {
    "a prompt is computed in chunks, and what runs comes before them": (
        small(),
        [Request(0, 0, 4, 4), Request(1, 1, 12, 1)],
        ["0: 0+4 free 4", "1: 0+1 1+7 free 1", "2: 0+1 1+5 done 1 free 0", "3: 0+1 done 0 free 3"],
    ),
    "a prompt that is not cut waits for a whole budget": (
        small(enable_chunked_prefill=False, max_model_len=8),
        [Request(0, 0, 4, 3), Request(1, 0, 5, 1), Request(2, 0, 1, 1)],
        ["0: 0+4 free 4", "1: 0+1 1+5 2+1 done 1 done 2 free 0", "2: 0+1 done 0 free 3"],
    ),
    "seats are limited": (
        small(max_num_seqs=1),
        [Request(0, 0, 4, 2), Request(1, 0, 4, 1)],
        ["0: 0+4 free 4", "1: 0+1 done 0 free 3", "2: 1+4 done 1 free 4"],
    ),
    "a prompt is admitted if all of it fits": (
        small(max_model_len=16, kv_blocks=4, max_num_batched_tokens=4),
        [Request(0, 0, 4, 2), Request(1, 1, 14, 1)],
        [
            "0: 0+4 free 3",
            "1: 0+1 done 0 free 2",
            "2: 1+4 free 3",
            "3: 1+4 free 2",
            "4: 1+4 free 1",
            "5: 1+2 done 1 free 0",
        ],
    ),
    "or, without that reserve, if its first chunk does": (
        small(max_model_len=16, kv_blocks=4, max_num_batched_tokens=4, reserve_full_prompt=False),
        [Request(0, 0, 4, 2), Request(1, 1, 14, 1)],
        ["0: 0+4 free 3", "1: 0+1 1+3 done 0 free 1", "2: 1+4 free 2", "3: 1+4 free 1", "4: 1+3 done 1 free 0"],
    ),
    "a watermark of a block stays free beside others, but an idle engine uses it": (
        small(watermark=0.2, max_num_batched_tokens=16),
        [Request(0, 0, 4, 2), Request(1, 1, 12, 1), Request(2, 2, 17, 1)],
        [
            "0: 0+4 free 4",
            "1: 0+1 done 0 free 3",
            "2: 1+12 done 1 free 2",
            "3: 2+16 free 1",
            "4: 2+1 done 2 free 0",
        ],
    ),
    "the first that does not fit stops admission": (
        small(),
        [Request(0, 0, 7, 2), Request(1, 0, 16, 1), Request(2, 0, 1, 1)],
        ["0: 0+7 free 3", "1: 0+1 done 0 free 3", "2: 1+8 free 3", "3: 1+8 done 1 free 1", "4: 2+1 done 2 free 4"],
    ),
    "what is preempted computes its outputs again in one pass, and goes before what came later": (
        small(enable_prefix_caching=False, max_num_batched_tokens=16),
        [Request(0, 0, 8, 6), Request(1, 0, 7, 6), Request(2, 1, 1, 1)],
        [
            "0: 0+8 1+7 free 1",
            "1: 0+1 1+1 free 0",
            "2: 0+1 out 1 free 2",
            "3: 0+1 free 2",
            "4: 0+1 free 2",
            "5: 0+1 done 0 free 1",
            "6: 1+9 2+1 done 2 free 1",
            "7: 1+1 free 2",
            "8: 1+1 free 2",
            "9: 1+1 done 1 free 2",
        ],
    ),
    "what is left of its blocks it does not compute again": (
        small(max_num_batched_tokens=16),
        [Request(0, 0, 8, 6), Request(1, 0, 7, 6)],
        [
            "0: 0+8 1+7 free 1",
            "1: 0+1 1+1 free 0",
            "2: 0+1 out 1 free 2",
            "3: 0+1 free 2",
            "4: 0+1 free 2",
            "5: 0+1 done 0 free 1",
            "6: 1+5 hit 1:4 free 2",
            "7: 1+1 free 2",
            "8: 1+1 free 2",
            "9: 1+1 done 1 free 2",
        ],
    ),
    "who is served first is who has the lower priority, and then who came first": (
        small(policy="priority", max_num_seqs=1),
        [Request(0, 0, 1, 3), Request(3, 1, 1, 1, priority=1), Request(1, 2, 1, 1, priority=1), Request(2, 2, 1, 1)],
        [
            "0: 0+1 free 4",
            "1: 0+1 free 4",
            "2: 0+1 done 0 free 4",
            "3: 2+1 done 2 free 4",
            "4: 3+1 done 3 free 4",
            "5: 1+1 done 1 free 4",
        ],
    ),
    "of equal priorities who came last is preempted": (
        small(policy="priority", enable_prefix_caching=False, max_num_batched_tokens=16),
        [Request(1, 0, 7, 3), Request(0, 1, 8, 3)],
        [
            "0: 1+7 free 3",
            "1: 1+1 0+8 free 1",
            "2: 1+1 out 0 done 1 free 2",
            "3: 0+9 free 2",
            "4: 0+1 done 0 free 2",
        ],
    ),
    "the highest priority number is preempted, here of an iteration that is left with nothing": (
        small(policy="priority", enable_prefix_caching=False),
        [Request(0, 0, 6, 9, priority=1), Request(1, 0, 6, 3, priority=2), Request(2, 1, 3, 9)],
        [
            "0: 0+6 1+2 free 2",
            "1: 0+1 1+4 2+3 free 0",
            "2: 0+1 1+1 2+1 free 0",
            "3: 0+1 2+1 out 1 free 0",
            "4: 0+1 2+1 free 0",
            "5: 0+1 2+1 free 0",
            "6: 0+1 2+1 free 0",
            "7: out 0 free 3",
            "8: 2+1 free 2",
            "9: 2+1 free 2",
            "10: 2+1 done 2 free 2",
            "11: 0+8 free 3",
            "12: 0+5 free 1",
            "13: 0+1 done 0 free 1",
            "14: 1+8 done 1 free 3",
        ],
    ),
    "what was scheduled already can be preempted by who comes later, and its tokens of the budget serve others": (
        small(policy="priority", kv_blocks=7, enable_prefix_caching=False, reserve_full_prompt=False),
        [Request(0, 0, 12, 3, priority=1), Request(1, 1, 8, 2), Request(2, 2, 10, 1)],
        [
            "0: 0+8 free 5",
            "1: 0+4 1+4 free 3",
            "2: 0+1 1+4 2+3 free 0",
            "3: 1+1 2+7 out 0 done 1 done 2 free 1",
            "4: 0+8 free 5",
            "5: 0+6 done 0 free 3",
        ],
    ),
    "without the cache a prompt is computed each time": (
        small(enable_prefix_caching=False),
        [Request(0, 0, 8, 1, chain=PROMPT), Request(1, 1, 8, 1, chain=PROMPT)],
        ["0: 0+8 done 0 free 3", "1: 1+8 done 1 free 3"],
    ),
    "a block being filled is found in the same iteration": (
        small(max_num_batched_tokens=16),
        [Request(0, 0, 9, 1, chain=LEFT), Request(1, 0, 9, 1, chain=RIGHT)],
        ["0: 0+9 1+1 hit 1:8 done 0 done 1 free 1"],
    ),
    "a block with a fork in it is the child's": (
        small(),
        [Request(0, 0, 8, 1, chain=PROMPT), Request(1, 1, 8, 1, chain=Chain("early", PROMPT, 7))],
        ["0: 0+8 done 0 free 3", "1: 1+4 hit 1:4 done 1 free 3"],
    ),
    "of equal blocks the oldest is used: the other stays free": (
        small(max_num_batched_tokens=16),
        [Request(0, 0, 9, 3, chain=LEFT), Request(1, 1, 8, 1, chain=PROMPT), Request(2, 2, 9, 1, chain=RIGHT)],
        ["0: 0+9 free 2", "1: 0+1 1+4 hit 1:4 done 1 free 1", "2: 0+1 2+1 hit 2:8 done 0 done 2 free 1"],
    ),
    "a block that was not full is overwritten before any that was": (
        small(max_num_batched_tokens=16),
        [Request(0, 0, 9, 1, chain=LEFT), Request(1, 1, 12, 1), Request(2, 2, 9, 1, chain=LEFT)],
        ["0: 0+9 done 0 free 2", "1: 1+12 done 1 free 2", "2: 2+1 hit 2:8 done 2 free 2"],
    ),
    "the tail of what ended first is overwritten first": (
        small(),
        [
            Request(0, 0, 8, 1, chain=LEFT),
            Request(1, 1, 8, 1),
            Request(2, 2, 8, 1),
            Request(3, 3, 9, 1, chain=LEFT),
        ],
        ["0: 0+8 done 0 free 3", "1: 1+8 done 1 free 3", "2: 2+8 done 2 free 3", "3: 3+5 hit 3:4 done 3 free 2"],
    ),
    "a prompt that is all there computes its last block again": (
        roomy(),
        [Request(number, number, 8, 1, chain=PROMPT) for number in range(2)] + [Request(2, 2, 5, 1, chain=PROMPT)],
        ["0: 0+8 done 0 free 62", "1: 1+4 hit 1:4 done 1 free 62", "2: 2+1 hit 2:4 done 2 free 62"],
    ),
    "the chunk of a running request is found by one admitted in the same iteration": (
        roomy(max_num_batched_tokens=10),
        [Request(0, 0, 16, 1, chain=PROMPT), Request(1, 1, 16, 1, chain=PROMPT)],
        ["0: 0+10 free 61", "1: 0+6 1+4 hit 1:12 done 0 done 1 free 59"],
    ),
    "a block that is computed twice is held twice": (
        roomy(),
        [Request(number, 0, 8, 1, chain=PROMPT) for number in range(2)],
        ["0: 0+8 1+4 hit 1:4 done 0 done 1 free 61"],
    ),
    "what is generated is found too, but for the last token, which was never computed": (
        roomy(),
        [
            Request(0, 0, 5, 4, chain=OTHER),
            Request(1, 0, 5, 3, chain=PROMPT),
            Request(2, 9, 12, 1, chain=OTHER),
            Request(3, 10, 12, 1, chain=PROMPT),
        ],
        [
            "0: 0+5 1+5 free 60",
            "1: 0+1 1+1 free 60",
            "2: 0+1 1+1 done 1 free 60",
            "3: 0+1 done 0 free 62",
            "9: 2+4 hit 2:8 done 2 free 61",
            "10: 3+8 hit 3:4 done 3 free 61",
        ],
    ),
    "who is found counts as used last": (
        small(max_model_len=8, kv_blocks=3),
        [
            Request(0, 0, 4, 1, chain=OTHER),
            Request(1, 1, 4, 1, chain=PROMPT),
            Request(2, 2, 5, 1, chain=OTHER),
            Request(3, 3, 7, 1),
            Request(4, 4, 5, 1, chain=OTHER),
            Request(5, 5, 5, 1, chain=PROMPT),
        ],
        [
            "0: 0+4 done 0 free 2",
            "1: 1+4 done 1 free 2",
            "2: 2+1 hit 2:4 done 2 free 1",
            "3: 3+7 done 3 free 1",
            "4: 4+1 hit 4:4 done 4 free 1",
            "5: 5+5 done 5 free 1",
        ],
    ),
    "several are preempted from the tail and come back in order": (
        roomy(max_model_len=16, kv_blocks=8, enable_prefix_caching=False),
        [Request(number, 0, 8, 4) for number in range(4)],
        [
            "0: 0+8 1+8 2+8 3+8 free 0",
            "1: 0+1 1+1 out 3 out 2 free 2",
            "2: 0+1 1+1 free 2",
            "3: 0+1 1+1 done 0 done 1 free 2",
            "4: 2+9 3+9 free 2",
            "5: 2+1 3+1 free 2",
            "6: 2+1 3+1 done 2 done 3 free 2",
        ],
    ),
    "a request may preempt itself": (
        roomy(max_model_len=12, kv_blocks=4),
        [Request(0, 0, 4, 4), Request(1, 0, 7, 5)],
        [
            "0: 0+4 1+7 free 1",
            "1: 0+1 1+1 free 0",
            "2: 0+1 out 1 free 2",
            "3: 0+1 done 0 free 2",
            "4: 1+1 hit 1:8 free 1",
            "5: 1+1 free 1",
            "6: 1+1 done 1 free 1",
        ],
    ),
    "of equally low ones that came together the first to run is preempted": (
        roomy(max_model_len=12, kv_blocks=6, policy="priority"),
        [Request(number, 0, 7, 5) for number in range(3)],
        [
            "0: 0+7 1+7 2+7 free 0",
            "1: 0+1 1+1 2+1 free 0",
            "2: out 0 free 2",
            "3: 1+1 2+1 free 0",
            "4: 1+1 2+1 free 0",
            "5: 1+1 2+1 done 1 done 2 free 0",
            "6: 0+9 free 3",
            "7: 0+1 free 3",
            "8: 0+1 done 0 free 3",
        ],
    ),
    "with a longer context found in blocks that are free, these are taken from the free ones": (
        roomy(kv_blocks=17),
        [Request(0, 0, 9, 1, chain=LEFT), Request(1, 0, 9, 4), Request(2, 2, 60, 1, chain=RIGHT)],
        [
            "0: 0+9 1+9 done 0 free 11",
            "1: 1+1 free 14",
            "2: 1+1 free 14",
            "3: 1+1 done 1 free 14",
            "4: 2+52 hit 2:8 done 2 free 2",
        ],
    ),
    "and what a running request holds is not": (
        roomy(kv_blocks=16),
        [Request(0, 0, 9, 4, chain=LEFT), Request(1, 2, 60, 1, chain=RIGHT)],
        ["0: 0+9 free 13", "1: 0+1 free 13", "2: 0+1 1+52 hit 1:8 done 1 free 0", "3: 0+1 done 0 free 13"],
    ),
    "what a cancelled request computed can be found": (
        roomy(max_num_batched_tokens=10),
        [Request(0, 0, 16, 5, chain=PROMPT, cancel_at=1), Request(1, 3, 16, 1, chain=PROMPT)],
        ["0: 0+10 free 61", "3: 1+8 hit 1:8 done 1 free 60"],
    ),
    "cancellations come before arrivals of the same instant": (
        roomy(max_num_seqs=1),
        [
            Request(0, 0, 4, 50, cancel_at=2),
            Request(1, 2, 4, 1),
            Request(2, 1, 4, 5, cancel_at=1),
            Request(3, 1, 4, 5, cancel_at=2),
        ],
        ["0: 0+4 free 63", "1: 0+1 free 62", "2: 1+4 done 1 free 63"],
    ),
}


@pytest.mark.parametrize(("config", "requests", "wanted"), SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedules(config: EngineConfig, requests: list[Request], wanted: list[str]) -> None:
    assert trace(naive_run(config, Ticks(), requests)) == wanted


def test_a_cost_is_asked_for_what_attends_to_what() -> None:
    cost = Ticks()
    result = naive_run(small(), cost, [Request(0, 0, 3, 4), Request(1, 1, 9, 2)])
    assert trace(result) == [
        "0: 0+3 free 4",
        "1: 0+1 1+7 free 2",
        "2: 0+1 1+2 free 0",
        "3: 0+1 1+1 done 0 done 1 free 0",
    ]
    assert cost.asked == [(0, 0, (3, 0)), (1, 4, (7, 0)), (1, 5, (2, 7)), (2, 6 + 10)]


def test_a_last_chunk_of_one_token_is_no_decode() -> None:
    cost = Ticks()
    naive_run(small(), cost, [Request(0, 0, 9, 2)])
    assert cost.asked == [(0, 0, (8, 0)), (0, 0, (1, 8)), (1, 10)]


def test_what_resumes_is_in_prefill_again() -> None:
    cost = Ticks()
    result = naive_run(small(max_num_batched_tokens=16), cost, [Request(0, 0, 8, 6), Request(1, 0, 7, 6)])
    asked = {line(step): told for step, told in zip(result.steps, cost.asked, strict=True)}
    assert asked["2: 0+1 out 1 free 2"] == (1, 10)
    assert asked["6: 1+5 hit 1:4 free 2"] == (0, 0, (5, 4))
    assert asked["7: 1+1 free 2"] == (1, 10)


@pytest.mark.parametrize(
    ("prompt", "outputs", "status", "end"),
    [(0, 1, "refused", 5), (1, 0, "refused", 5), (20, 1, "refused", 5), (19, 7, "finished", 8), (1, 1, "finished", 6)],
)
def test_limits_of_a_request(prompt: int, outputs: int, status: str, end: int) -> None:
    result = naive_run(small(), Ticks(), [Request(0, 5, prompt, outputs)])
    assert (result.statuses[0], result.times[0][1]) == (status, end)


@pytest.mark.parametrize(
    ("arrival", "cancel_at", "times"),
    [
        (0, 4, (1, 5)),  # boundaries are at 0, 1, 5 and 9
        (0, 5, (1, 5)),
        (0, 0, (None, 0)),
        (3, 2, (None, 3)),  # before it arrives
        (3, 4, (None, 5)),  # when it arrived, but before it was admitted
        (3, 99, (9, 17)),
    ],
)
def test_a_cancellation_takes_effect_at_a_boundary(arrival: int, cancel_at: int, times: tuple[int | None, int]) -> None:
    class Slow(Ticks):
        def decode(self, sequences: int, context: int) -> int:
            return 4

        def mixed(self, sequences: int, context: int, chunks: list[tuple[int, int]]) -> int:
            return 4 if context else 1

    result = naive_run(small(), Slow(), [Request(0, 0, 2, 9), Request(1, arrival, 2, 3, cancel_at=cancel_at)])
    assert result.times[1] == times
    assert result.statuses[1] == ("finished" if cancel_at == 99 else "cancelled")
    assert result.statuses[0] == "finished"


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size is 2"):
        naive_run(small(pipeline_parallel_size=2), Ticks(), [])


@st.composite
def workloads(draw: st.DrawFn) -> tuple[EngineConfig, list[Request]]:
    block_size = draw(st.sampled_from([1, 2, 4]))
    config = EngineConfig(
        max_model_len=24,
        kv_blocks=draw(st.integers(24, 40)) // block_size,
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(6, 30)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        reserve_full_prompt=draw(st.booleans()),
    )
    trunk = Chain("trunk")
    chains = [trunk, Chain("branch", trunk, 5), Chain("limb", trunk, 8), None]
    requests = [
        Request(
            number,
            draw(st.integers(0, 60)),
            draw(st.integers(1, 24)),
            draw(st.integers(1, 16)),
            chain=draw(st.sampled_from(chains)),
            priority=draw(st.integers(0, 2)),
            cancel_at=draw(st.none() | st.integers(0, 120)),
        )
        for number in range(draw(st.integers(1, 8)))
    ]
    return config, requests


@given(workloads())
def test_a_trace_adds_up(workload: tuple[EngineConfig, list[Request]]) -> None:
    """Contexts, followed through the trace by addition alone, end with the requests and hold the blocks they need."""
    config, requests = workload
    result = naive_run(config, Weighed(), requests)
    asked = {request.number: request for request in requests}
    computed: dict[int, int] = {}  # of what runs
    generated = dict.fromkeys(asked, 0)
    preemptions = dict.fromkeys(asked, 0)
    end = 0
    for step in result.steps:
        assert end <= step.start < step.end
        end = step.end
        for number, status in result.statuses.items():
            if status == "cancelled" and result.times[number][1] <= step.start:
                computed.pop(number, None)
        for number in step.preempted:
            del computed[number]
            preemptions[number] += 1
        assert not (step.preempted and step.cached)
        for number, hit in step.cached:
            assert number not in computed and asked[number].arrival <= step.start
            assert hit % config.block_size == 0 and hit < asked[number].prompt_tokens + generated[number]
            assert hit == 0 or config.enable_prefix_caching
            computed[number] = hit
        assert {number for number, _ in step.scheduled} <= set(computed)
        assert sum(new for _, new in step.scheduled) <= config.max_num_batched_tokens
        assert len(computed) <= config.max_num_seqs
        finished = []
        for number, new in step.scheduled:
            tokens = asked[number].prompt_tokens + generated[number]
            computed[number] += new
            assert new >= 1 and computed[number] <= tokens
            if computed[number] == tokens:
                generated[number] += 1
                if generated[number] == 1:
                    assert result.times[number][0] == step.end
                if generated[number] == min(
                    asked[number].output_tokens, config.max_model_len - asked[number].prompt_tokens
                ):
                    assert result.statuses[number] == "finished" and result.times[number][1] == step.end
                    finished.append(number)
        held = sum(config.blocks(tokens) for tokens in computed.values())
        assert config.kv_blocks - held <= step.free_blocks  # shared blocks are held once
        assert config.enable_prefix_caching or config.kv_blocks - held == step.free_blocks
        assert step.finished == tuple(finished)
        for number in finished:
            del computed[number]
    assert preemptions == result.preemptions
    for number, status in result.statuses.items():
        assert status in ("finished", "cancelled", "refused")
        assert (status == "refused") == (asked[number].prompt_tokens + 1 > config.max_model_len)
        assert (result.times[number][0] is None) == (generated[number] == 0)
        assert asked[number].cancel_at is not None or status != "cancelled"


@given(workloads())
def test_requests_are_left_as_they_were(workload: tuple[EngineConfig, list[Request]]) -> None:
    config, requests = workload
    first = naive_run(config, Weighed(), requests)
    assert {request.status for request in requests} == {"waiting"}
    assert naive_run(config, Weighed(), list(reversed(requests))).steps == first.steps


@pytest.fixture
def vllm_schedule(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    with patch.dict(os.environ):  # importing it sets LD_PRELOAD and more, which other tests' processes would inherit
        from tests.oracles.fidelity.clocked import vllm_schedule

        yield vllm_schedule


@pytest.mark.integration
def test_vllm_decides_the_same(vllm_schedule: Callable[..., Any]) -> None:
    """In all cases above, and in random ones."""

    class Instant(Ticks):
        """There, an iteration that schedules nothing takes no time."""

        def decode(self, sequences: int, context: int) -> int:
            return 1 if sequences else 0

    preemptions = hits = 0
    by_hand = {name: (config, requests) for name, (config, requests, _) in SCHEDULES.items()}
    for name, (config, requests) in {**by_hand, **{f"seed {seed}": random_case(seed) for seed in range(30)}}.items():
        result = naive_run(config, Instant(), requests)
        decided = [
            (step.start, step.scheduled, step.preempted, step.cached, step.finished, step.free_blocks)
            for step in result.steps
        ]
        assert decided == [
            (step.time, step.scheduled, step.preempted, step.cached, step.finished, step.free_blocks)
            for step in vllm_schedule(config, requests)
        ], name
        if name not in by_hand:
            preemptions += sum(result.preemptions.values())
            hits += sum(tokens > 0 for step in result.steps for _, tokens in step.cached)
    assert preemptions > 50 and hits > 50  # else the cases are too easy to tell anything
