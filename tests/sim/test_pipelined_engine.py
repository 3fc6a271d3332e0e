"""Pipelined engines: batches overlap, requests do not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.workload.requests import Requests
from tests.oracles.fidelity.random_workloads import random_case

COST = AffineCost(5000, 20, 3, 25, 1)


def served(
    config: EngineConfig, requests: list[Request], cost: AffineCost = COST, updates: tuple[WeightUpdate, ...] = ()
) -> tuple[SimCluster, list[Iteration]]:
    iterations: list[Iteration] = []
    ordered = sorted(requests, key=lambda request: (request.arrival, request.number))
    cluster = SimCluster(
        [EngineSpec("e", config, cost)], Requests(lambda: ordered, {}), trace=iterations.append, updates=updates
    )
    cluster.run()
    return cluster, iterations


def test_a_request_alone_takes_as_long_as_without_stages() -> None:
    """Stages divide the layers of an iteration, which one request passes one after the other."""
    ends = []
    for stages in (1, 2, 4):
        request = Request(0, 0, 100, 10)
        served(EngineConfig(max_model_len=256, kv_blocks=64, pipeline_parallel_size=stages), [request])
        ends.append((request.first_token, request.finish))
    assert ends == [ends[0]] * 3


def test_two_batches_follow_each_other_a_stage_apart() -> None:
    """100 ticks an iteration, two stages: the second prompt enters the first stage when the first prompt leaves it."""
    config = EngineConfig(max_model_len=64, kv_blocks=64, max_num_seqs=8, pipeline_parallel_size=2)
    requests = [Request(0, 0, 8, 2), Request(1, 10, 8, 2)]
    _, iterations = served(config, requests, AffineCost(100))
    assert [(it.start, it.end, it.scheduled) for it in iterations] == [
        (0, 100, ((0, 8),)),
        (10, 150, ((1, 8),)),
        (100, 200, ((0, 1),)),
        (150, 250, ((1, 1),)),
    ]


def test_a_long_prompt_has_a_chunk_in_every_stage() -> None:
    config = EngineConfig(
        max_model_len=64, kv_blocks=64, max_num_seqs=8, max_num_batched_tokens=8, pipeline_parallel_size=2
    )
    request = Request(0, 0, 24, 1)
    _, iterations = served(config, [request], AffineCost(100))
    assert [(it.start, it.end, it.scheduled) for it in iterations] == [
        (0, 100, ((0, 8),)),
        (0, 150, ((0, 8),)),
        (100, 200, ((0, 8),)),
    ]
    assert request.finish == 200


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_multiply_what_a_full_engine_does(stages: int) -> None:
    """Less what batches of unequal size leave idle in the stages."""
    ends = []
    for pipeline in (1, stages):
        config = EngineConfig(max_model_len=1024, kv_blocks=20_000, max_num_seqs=128, pipeline_parallel_size=pipeline)
        cluster, _ = served(config, [Request(number, 0, 512, 128) for number in range(400)])
        ends.append(cluster.now)
        assert cluster.engines[0].busy_ticks == pytest.approx(cluster.now, rel=0.05)
    assert ends[0] / stages < ends[1] < 1.5 * ends[0] / stages


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4]), st.booleans(), st.booleans())
def test_nothing_is_lost_and_no_request_is_in_two_batches(seed: int, stages: int, update: bool, refresh: bool) -> None:
    config, requests = random_case(seed)
    for request in requests:
        request.arrival *= 1000
        request.cancel_at = None if request.cancel_at is None else 1000 * request.cancel_at
    updates = (WeightUpdate(3_000, 500, refresh),) if update else ()
    cluster, iterations = served(
        replace(config, pipeline_parallel_size=stages), [*requests], AffineCost(500, 20, 3, 5, 1), updates
    )
    engine = cluster.engines[0]
    assert {request.status for request in requests} <= {"finished", "cancelled"}
    assert (engine.pool.free, engine.load_tokens) == (config.kv_blocks, 0)
    for request in requests:
        if request.status == "finished":
            assert request.generated == request.output_tokens
    under_way = defaultdict(list)
    for iteration in iterations:
        for number, tokens in iteration.scheduled:
            under_way[number].append((iteration.start, iteration.end, tokens))
    for number, spans in under_way.items():
        request = next(request for request in requests if request.number == number)
        if request.preemptions or (update and refresh):  # chunks of its prompt come again, and may overlap
            continue
        generating = [
            (start, end)
            for start, end, tokens in spans
            if request.first_token is not None and start >= request.first_token and tokens == 1
        ]
        assert all(first[1] <= second[0] for first, second in pairwise(generating))
    ends = [iteration.end for iteration in iterations if iteration.scheduled]
    assert ends == sorted(ends)  # batches leave the pipeline in the order in which they entered


def test_blocks_are_held_as_long_with_stages_as_without() -> None:
    held = []
    for stages in (1, 2, 4):
        config = EngineConfig(max_model_len=256, kv_blocks=64, pipeline_parallel_size=stages)
        cluster, _ = served(config, [Request(0, 0, 100, 60)])
        held.append(cluster.engines[0].held_ticks / 2 / 64 / cluster.now)
    assert held == pytest.approx([held[0]] * 3, rel=0.05)


def test_a_pause_counts_up_to_the_time_limit() -> None:
    config = EngineConfig(max_model_len=64, kv_blocks=64, pipeline_parallel_size=2)
    cluster = SimCluster(
        [EngineSpec("e", config, AffineCost(100))],
        Requests(lambda: [Request(0, 0, 8, 9)], {}),
        updates=(WeightUpdate(250, 5000),),
        time_limit=1300,
    )
    cluster.run()
    assert cluster.engines[0].paused_ticks == 1000
