"""The compressed engine, the same one visiting every iteration, the naive one and vLLM's own scheduler: all decide the
same, iteration by iteration and tick by tick."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Make, Run, naive, simulate

from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.iteration_cost import (
    NONE_ADMITTED,
    UNLIMITED,
    Admitted,
    AffineCost,
    Chunk,
    DecodeBatch,
    IterationCost,
)
from libra.sim.engine.request import Request
from tests.oracles.fidelity.random_workloads import random_case

VLLM_CASES = 60

seeds = st.integers(0, 2**32)


@dataclass(frozen=True)
class KneeCost:
    """Piecewise linear in context, and a batch counts as the next multiple of `graph`: knees are passed inside jumps.

    The pieces do not meet at the knees, and times may fall there: nothing may depend on their being smooth.
    """

    knees: tuple[int, ...]  # tokens of context together
    bases: tuple[int, ...]  # ticks, one more than knees
    slopes: tuple[int, ...]  # ticks per token
    graph: int

    @property
    def uneven(self) -> bool:
        return False

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        piece = bisect_right(self.knees, context)
        padded = -(-batch.requests // self.graph) * self.graph
        limit = self.knees[piece] if piece < len(self.knees) else UNLIMITED
        return self.bases[piece] + 7 * padded, self.slopes[piece], limit

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        new = sum(chunk for chunk, _ in chunks)
        return 11 + 5 * batch.requests + context // 3 + 13 * new + sum(chunk * before for chunk, before in chunks) // 4


@st.composite
def affine_costs(draw: st.DrawFn, config: EngineConfig) -> AffineCost:
    return AffineCost(
        draw(st.integers(1, 5000)),
        draw(st.integers(0, 50)),
        draw(st.integers(0, 20)),
        draw(st.integers(0, 40)),
        draw(st.integers(0, 3)),
    )


@st.composite
def knee_costs(draw: st.DrawFn, config: EngineConfig) -> KneeCost:
    most = config.max_num_seqs * config.max_model_len
    knees = sorted(draw(st.sets(st.integers(1, most), max_size=8)))
    pieces = len(knees) + 1
    return KneeCost(
        tuple(knees),
        tuple(draw(st.lists(st.integers(1, 3000), min_size=pieces, max_size=pieces))),
        tuple(draw(st.lists(st.integers(0, 9), min_size=pieces, max_size=pieces))),
        draw(st.integers(1, 8)),
    )


GRID = EngineGrid(
    tp=1,
    batches=(1, 4, 16),
    contexts=(8, 32, 128),
    decode=((1.0e-6, 1.1e-6, 1.7e-6), (1.05e-6, 1.5e-6, 3.9e-6), (1.3e-6, 2.6e-6, 9.1e-6)),
    chunks=(4, 32, 128),
    prefixes=(0, 64, 192),
    prefill=((1.1e-6, 1.2e-6, 1.4e-6), (1.9e-6, 2.6e-6, 4.1e-6), (5.0e-6, 8.1e-6, 14.4e-6)),
)


@st.composite
def grid_costs(draw: st.DrawFn, config: EngineConfig) -> GridCost:
    overhead = HostCost(
        draw(st.sampled_from([0.0, 0.4e-6, 1.6e-6])), draw(st.sampled_from([0.0, 5e-8])), draw(st.booleans())
    )
    sizes = draw(st.sets(st.sampled_from([1, 2, 4, 8, 12, 16])))
    captures = tuple(sorted(size for size in sizes if size <= config.max_num_batched_tokens))
    return GridCost(GRID, replace(config, capture_sizes=captures), overhead)


def longest_iteration(config: EngineConfig, cost: IterationCost) -> int:
    """Ticks that no iteration exceeds by much: a full batch of long contexts, or that and prompt up to the budget."""
    seats, length, budget = config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens
    lines = (
        (*cost.line(DecodeBatch(seats), context), context) for context in range(seats, seats * length + 1, 1 + seats)
    )
    decode = max(base + slope * context for base, slope, _, context in lines)
    beside = min(seats, budget - 1)
    mixed = cost.mixed(DecodeBatch(beside), beside * length, [(budget - beside, length)])
    return max(decode, mixed, cost.mixed(DecodeBatch(0), 0, [(budget, 0)]))


def timed(seed: int, ticks: int, generic: bool) -> list[Request]:
    """The requests of a random case whose steps take so many ticks: on the lattice of steps, or anywhere after it."""
    random = Random(seed)
    _, requests = random_case(seed)
    for request in requests:
        # All of one step are late by as much, so that those that came together do so still.
        late = Random(f"{seed} {request.arrival}").randrange(ticks) if generic else 0
        if request.cancel_at is not None:
            request.cancel_at = request.cancel_at * ticks + (random.randrange(ticks) if generic else 0)
        request.arrival = request.arrival * ticks + late
    return list(requests)


def assert_equal(config: EngineConfig, cost: IterationCost, make: Make) -> Run:
    """Compressed, exact, naive: every iteration, and what became of every request."""
    compressed = simulate(config, cost, make)
    exact = simulate(config, cost, make, exact=True)
    wanted = naive(config, cost, make)
    for run in (exact, compressed):
        assert run.steps == wanted.steps
        assert run.result == wanted
        assert run.engine.pool.free == config.kv_blocks
        assert run.engine.iterations == sum(1 for step in wanted.steps if step.scheduled)
        assert run.engine.busy_ticks == sum(step.end - step.start for step in wanted.steps)
        assert run.engine.load_tokens == 0
    assert compressed.order == exact.order
    assert compressed.engine.events <= exact.engine.events
    return compressed


@pytest.mark.parametrize("costs", [affine_costs, knee_costs, grid_costs])
@settings(max_examples=120, deadline=None)
@given(st.data(), seeds)
def test_hard_cases(costs: Callable[[EngineConfig], st.SearchStrategy[IterationCost]], data: Any, seed: int) -> None:
    """Costs are affine, have knees in context and steps in the batch, or are of a grid with graphs and overhead."""
    config, _ = random_case(seed)
    cost = data.draw(costs(config))
    # Where iterations take as many ticks as there are between two steps of the case, or less, a session's next turn
    # comes when the one before has ended; so much of a case's slack may be used up.
    ticks = max(1, longest_iteration(config, cost) // data.draw(st.sampled_from([1, 2, 4])))
    generic = data.draw(st.booleans())
    assert_equal(config, cost, lambda: timed(seed, ticks, generic))


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_iterations_of_one_tick_where_everything_is_a_tie(seed: int) -> None:
    config, _ = random_case(seed)
    assert_equal(config, AffineCost(1), lambda: random_case(seed)[1])


small_configs = st.builds(
    lambda block_size, blocks, seats, budget, policy, caching, watermark, whole: EngineConfig(
        max_model_len=32,
        kv_blocks=blocks // block_size,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, budget),
        policy=policy,
        enable_prefix_caching=caching,
        watermark=watermark,
        reserve_full_prompt=whole,
    ),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(32, 80),
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from(["fcfs", "priority"]),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)


def test_random_cases_jump_preempt_and_hit() -> None:
    """What the properties above rest on: the cases are hard, and most of their iterations are not visited."""
    cost = KneeCost((300, 900), (900, 1100, 1000), (2, 1, 3), 4)
    preemptions = hits = events = iterations = 0
    for seed in range(40):
        config, _ = random_case(seed)
        run = simulate(config, cost, lambda seed=seed: timed(seed, 3000, True))  # type: ignore[misc]
        preemptions += run.engine.preemptions
        hits += sum(tokens for it in run.iterations for _, tokens in it.cached)
        events += run.engine.events
        iterations += run.engine.iterations
    assert preemptions > 100
    assert hits > 1000
    assert events < iterations / 2


@pytest.mark.integration
@patch.dict(os.environ)  # importing vLLM sets LD_PRELOAD and more, which the processes of other tests would inherit
def test_vllm_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from tests.oracles.fidelity.schedule import compare, summary

    pairs = ("pd", "pd-async", "pd-fails", "pd-fails-async", "pd-drafts", "pd-tiers")
    ranks = ("dp", "dp-async", "dp-drafts", "dp-drafts-async")
    tiers = ("tiers", "tiers-async", "tiers-drafts")
    kinds = ("async", "hybrid", "hybrid-async", "pull", "pull-async", "drafts", "drafts-async", "both")
    for kind in (*kinds, *pairs, *ranks, *tiers):
        other = summary(compare(range(2000, 2000 + VLLM_CASES // 10), kind))
        assert other.difference is None
        assert other.counts["preemptions"] > 0 and other.counts["prefix cache hits"] > 0
    found = summary(compare(range(1000, 1000 + VLLM_CASES)))
    assert found.difference is None
    assert found.cases == VLLM_CASES
    assert found.counts["preemptions"] > VLLM_CASES and found.counts["prefix cache hits"] > VLLM_CASES
    assert found.counts["cancelled requests"] > VLLM_CASES // 2
    assert VLLM_CASES // 4 < found.counts["workloads with priorities"] < VLLM_CASES
