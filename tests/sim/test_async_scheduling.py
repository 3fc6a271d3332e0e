"""Asynchronous scheduling: an event reaches a boundary one later, and visiting iterations makes no difference.

That every step is the one of vLLM's own `AsyncScheduler` is seen with vLLM, in `test_vllm_itself`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from driven_engine import Case, assert_nobody_can_tell, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import assert_visited_alike, simulate
from test_batching_equality import affine_costs, grid_costs, knee_costs, longest_iteration, seeds, timed

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import AffineCost, IterationCost
from libra.sim.engine.request import Request, Stop
from tests.oracles.fidelity.random_workloads import random_case

CONFIG = EngineConfig(max_model_len=64, kv_blocks=16, block_size=4, max_num_seqs=2, async_scheduling=True)
TEN = AffineCost(10)  # ticks for any iteration


def test_an_arrival_waits_for_the_iteration_that_is_decided_already() -> None:
    """The second request comes with the first one's second iteration under way, and the third decided."""
    run = simulate(CONFIG, TEN, lambda: [Request(0, 0, 8, 5), Request(1, 12, 8, 2)])
    assert [(it.start, it.scheduled) for it in run.iterations] == [
        (0, ((0, 8),)),
        (10, ((0, 1),)),
        (20, ((0, 1),)),
        (30, ((0, 1), (1, 8))),
        (40, ((0, 1), (1, 1))),
    ]
    assert (run.requests[1].scheduled, run.requests[1].first_token, run.requests[1].finish) == (30, 40, 50)


@pytest.mark.parametrize(("stop", "row"), [("length", False), ("eos", True)])
def test_the_place_of_a_request_that_ends_is_free_an_iteration_later(stop: Stop, row: bool) -> None:
    """Its last token comes at 20. A length is known beforehand, so that it is not in the iteration after that; a stop
    token is seen too late for that. Either way its place is taken in the one after next."""
    config = replace(CONFIG, max_num_seqs=1)
    run = simulate(config, TEN, lambda: [Request(0, 0, 8, 2, stop=stop), Request(1, 0, 8, 1)])
    assert run.requests[0].finish == 20
    scheduled = [(it.start, it.scheduled) for it in run.iterations]
    after = [(20, ((0, 1),)), (30, ((1, 8),))] if row else [(20, ((1, 8),))]
    assert scheduled == [(0, ((0, 8),)), (10, ((0, 1),)), *after]
    assert run.requests[0].generated == 2


def test_a_token_under_way_counts_for_whoever_is_preempted() -> None:
    """The first request needs a third block, for an iteration that is decided while the second's last token comes."""
    config = replace(CONFIG, max_model_len=16, kv_blocks=4, enable_prefix_caching=False)
    run = simulate(config, TEN, lambda: [Request(0, 0, 4, 8), Request(1, 0, 3, 5)])
    preempted = [(it.start, it.preempted) for it in run.iterations if it.preempted]
    assert preempted == [(50, (1,))]
    assert (run.requests[1].status, run.requests[1].finish, run.requests[1].preemptions) == ("finished", 50, 1)
    assert run.engine.pool.free == 4


def stopping(seed: int, requests: list[Request]) -> list[Request]:
    """Some of the requests end with a token. Two may end on one chain only if neither generates there."""
    random = Random(seed)
    for request in requests:
        if request.output_tokens > 1 and random.random() < 0.5:
            request.stop = "eos"
    return requests


@pytest.mark.parametrize("costs", [affine_costs, knee_costs, grid_costs])
@settings(max_examples=60, deadline=None)
@given(st.data(), seeds)
def test_jumps_are_as_if_every_iteration_was_visited(
    costs: Callable[[EngineConfig], st.SearchStrategy[IterationCost]], data: Any, seed: int
) -> None:
    config = replace(random_case(seed)[0], async_scheduling=True)
    cost = data.draw(costs(config))
    ticks = max(1, longest_iteration(config, cost) // data.draw(st.sampled_from([1, 2, 4])))
    generic = data.draw(st.booleans())
    assert_visited_alike(config, cost, lambda: stopping(seed, timed(seed, ticks, generic)))


@settings(max_examples=120, deadline=None)
@given(
    cases(adopting=True, closing=True, asking=True, pausing=True),
    st.lists(st.sampled_from(["length", "eos"]), min_size=8, max_size=8),
)
def test_nobody_who_asks_can_tell(case: Case, stops: list[Stop]) -> None:
    """Requests that are given up, interrupted or asked about; pauses, KV that comes, an engine that closes."""
    turns = tuple(replace(turn, stop=stop) for turn, stop in zip(case.turns, stops, strict=False))
    case = replace(case, turns=turns, config=replace(case.config, async_scheduling=True))
    assert_nobody_can_tell(case)


def test_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match="async_scheduling with pipeline_parallel_size 2 is not simulated"):
        replace(CONFIG, pipeline_parallel_size=2)
