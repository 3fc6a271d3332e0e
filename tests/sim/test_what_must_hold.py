"""What must hold of any simulation, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import QWEN_06B, QWEN_14B

from libra.cost.engine_memory import BLOCK, kv_tokens
from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.cost.transfer import (
    Fabric,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    dispatch_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
)
from libra.hardware.model import ModelSpec
from libra.route.catalogue import policy_named
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.iteration_cost import AffineCost, DecodeBatch, IterationCost
from libra.sim.engine.request import Request
from libra.sim.outcome.metrics import metrics_of
from libra.sim.outcome.result import result_of
from libra.sim.workload.distributions import Constant, Poisson
from libra.sim.workload.generated import generated_requests
from libra.sim.workload.requests import Requests
from tests.oracles.fidelity.random_workloads import random_case

STEP = 100  # ticks

GRID = EngineGrid(
    tp=1,
    batches=(1, 8, 64),
    contexts=(256, 1024, 4096),
    decode=((0.010, 0.010, 0.012), (0.011, 0.013, 0.020), (0.015, 0.027, 0.075)),
    chunks=(64, 512, 2048),
    prefixes=(0, 1024, 4096),
    prefill=((0.012, 0.013, 0.015), (0.050, 0.055, 0.070), (0.200, 0.230, 0.330)),
)


def config_of(**changes: Any) -> EngineConfig:
    settings = {"max_model_len": 1024, "kv_blocks": 256, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    return EngineConfig(**(settings | changes))


def run_on(
    config: EngineConfig, requests: Sequence[Request], cost: IterationCost | None = None, **more: Any
) -> SimCluster:
    """A cluster of one engine that has run; iterations take a step unless told."""
    ordered = sorted(requests, key=lambda request: (request.arrival, request.number))
    cluster = SimCluster(
        [EngineSpec("engine", config, cost or AffineCost(STEP))], Requests(lambda: ordered, {}), **more
    )
    cluster.run()
    return cluster


def slowly(seed: int, ticks: int) -> list[Request]:
    """The requests of a random case, with so many ticks for each one between them."""
    _, requests = random_case(seed)
    for request in requests:
        request.arrival *= ticks
        if request.cancel_at is not None:
            request.cancel_at *= ticks
    return list(requests)


# Requests


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.none() | st.integers(0, 400))
def test_every_submitted_request_completes_or_is_reported_with_a_reason(
    seed: int, stages: int, time_limit: int | None
) -> None:
    config, _ = random_case(seed)
    requests = slowly(seed, stages)
    for prompt_tokens, output_tokens in ((config.max_model_len, 3), (0, 3), (1, 0)):  # to be refused
        requests.append(Request(1000 + len(requests), 5, prompt_tokens, output_tokens))
    cluster = run_on(
        replace(config, pipeline_parallel_size=stages), requests, AffineCost(stages), time_limit=time_limit
    )
    assert sorted(request.number for request in cluster.requests) == sorted(request.number for request in requests)
    for request in cluster.requests:
        assert request.status in ("finished", "cancelled", "refused", "unfinished")
        assert (request.reason is not None) == (request.status in ("refused", "unfinished"))
        if request.status == "finished":
            assert request.generated == request.output_tokens
            assert request.prompt_tokens + request.generated <= config.max_model_len
        if request.status == "unfinished":
            assert cluster.partial and request.finish is None
        else:
            assert request.finish is not None and request.finish <= cluster.now
    if not cluster.partial:
        assert cluster.engines[0].pool.free == config.kv_blocks
        assert cluster.engines[0].load_tokens == 0


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "reason"),
    [
        (1024, 1, "a prompt of 1024 tokens leaves no room to generate within max_model_len 1024"),
        (5000, 1, "a prompt of 5000 tokens leaves no room to generate within max_model_len 1024"),
        (0, 1, "a prompt has 1 token or more"),
        (5, 0, "a request generates 1 token or more"),
    ],
)
def test_a_prompt_longer_than_the_model_length_is_refused_at_submission(
    prompt_tokens: int, output_tokens: int, reason: str
) -> None:
    cluster = run_on(config_of(), [Request(0, 0, 10, 50), Request(1, 7 * STEP, prompt_tokens, output_tokens)])
    accepted, refused = cluster.requests
    assert (refused.status, refused.finish, refused.scheduled) == ("refused", 7 * STEP, None)
    assert refused.reason is not None and reason in refused.reason
    assert (accepted.status, accepted.finish) == ("finished", 50 * STEP)


def test_the_longest_prompt_that_leaves_room_for_a_token_is_served() -> None:
    (request,) = run_on(config_of(), [Request(0, 0, 1023, 100)]).requests
    assert (request.status, request.generated) == ("finished", 1)


def test_token_counts_are_of_completed_work_only() -> None:
    """Of four requests one is done when time is up; what was generated for the others is in no rate."""
    requests = [
        Request(0, 0, 10, 5),
        Request(1, 0, 20, 50, cancel_at=8 * STEP),
        Request(2, 0, 30, 50),
        Request(3, 0, 2000, 50),
    ]
    cluster = run_on(config_of(), requests, time_limit=20 * STEP)
    found = metrics_of(result_of(cluster))
    assert (found.finished, found.cancelled, found.unfinished, found.refused) == (1, 1, 1, 1)
    assert (found.prompt_tokens, found.generated_tokens) == (10, 5)
    assert found.generated_rate == pytest.approx(5 * TICKS / (20 * STEP))
    assert found.latency is not None and found.latency.count == 1


def test_a_time_limit_stops_the_run_at_that_time_and_marks_it_partial() -> None:
    requests = [Request(0, 0, 10, 5), Request(1, 0, 10, 500), Request(2, 40 * STEP, 10, 5)]
    cluster = run_on(config_of(), requests, time_limit=20 * STEP + 50)
    assert cluster.partial and cluster.now == 20 * STEP + 50
    assert result_of(cluster).partial
    assert [(it.status, it.finish) for it in cluster.requests] == [
        ("finished", 5 * STEP),
        ("unfinished", None),
        ("unfinished", None),
    ]
    assert [it.reason for it in cluster.requests[1:]] == [
        "the time limit came first",
        "the time limit came before its arrival",
    ]
    assert cluster.requests[1].generated == 20


def test_a_time_limit_at_the_very_end_cuts_nothing_off() -> None:
    cluster = run_on(config_of(), [Request(0, 0, 10, 5)], time_limit=5 * STEP)
    assert not cluster.partial and cluster.requests[0].status == "finished"


# Time


@pytest.mark.parametrize(("arrival", "scheduled"), [(250, 300), (299, 300), (300, 300), (301, 400), (5000, 5000)])
def test_an_arrival_during_a_jump_is_visible_at_the_first_boundary_at_or_after_it(arrival: int, scheduled: int) -> None:
    cluster = run_on(config_of(), [Request(0, 0, 10, 50), Request(1, arrival, 10, 50)])
    assert cluster.requests[1].scheduled == scheduled
    assert cluster.engines[0].events <= 5


@pytest.mark.parametrize(
    "cost", [AffineCost(STEP, per_new_token=1), GridCost(GRID, config_of(max_model_len=4096))], ids=["affine", "grid"]
)
def test_time_to_first_token_rises_with_prompt_length(cost: IterationCost) -> None:
    config = config_of(max_model_len=4096)
    lengths = [2, 50, 64, 65, 500, 2047, 2048, 2049, 3000, 4095]
    times = [run_on(config, [Request(0, 0, length, 1)], cost).requests[0].first_token for length in lengths]
    known = [time for time in times if time is not None]
    assert len(known) == len(lengths)
    assert all(shorter < longer for shorter, longer in pairwise(known))


def test_a_graph_pads_a_batch_of_5_to_8() -> None:
    padded = GridCost(GRID, config_of(capture_sizes=(1, 2, 4, 8)))
    plain = GridCost(GRID, config_of())
    for context in (40, 2000, 9000, 30_000):
        assert (
            padded.line(DecodeBatch(5), context)
            == padded.line(DecodeBatch(8), context)
            == plain.line(DecodeBatch(8), context)
        )
        assert padded.line(DecodeBatch(4), context) == plain.line(DecodeBatch(4), context)
        assert padded.line(DecodeBatch(9), context) == plain.line(DecodeBatch(9), context)  # no graph is that large


def dispatched(size: float, group: Group, fabric: Fabric) -> np.ndarray:
    return dispatch_seconds(size, lambda parts: parts, group, fabric)


@given(st.integers(1, 64), st.sampled_from([1, 2, 8, 9, 64]), st.floats(1, 1e12), st.floats(1, 1e12))
def test_collective_time_is_monotone_in_bytes(size: int, stride: int, one: float, other: float) -> None:
    fabric = Fabric(gpus=8, link=100e9, network=20e9)
    group = Group(size, stride)
    fewer, more = sorted([one, other])
    for seconds in (all_gather_seconds, reduce_scatter_seconds, all_reduce_seconds, dispatched):
        assert 0 <= seconds(fewer, group, fabric) <= seconds(more, group, fabric)
    assert 0 < point_to_point_seconds(fewer, stride, fabric) <= point_to_point_seconds(more, stride, fabric)


@pytest.mark.parametrize(("rate", "seed"), [(0.3, 1), (8.0, 2), (8.0, 3), (2500.0, 4)])
def test_a_poisson_source_has_its_nominal_rate_within_a_hundredth(rate: float, seed: int) -> None:
    count = 100_000
    (*_, last) = np.concatenate(list(Poisson(rate).chunks(count, np.random.default_rng(seed))))
    assert count / (last / TICKS) == pytest.approx(rate, rel=0.01)
    made = list(generated_requests(count, Poisson(rate), Constant(8), Constant(8), seed).start())
    assert len(made) == count
    assert count / (made[-1].arrival / TICKS) == pytest.approx(rate, rel=0.01)


# Memory


@pytest.mark.parametrize("model", [QWEN_06B, QWEN_14B])
@pytest.mark.parametrize("stages", [1, 2])  # as far as the layers divide evenly
@pytest.mark.parametrize("tp", [1, 2])
def test_twice_the_pipeline_stages_at_fixed_memory_hold_at_least_twice_the_blocks(
    model: ModelSpec, stages: int, tp: int
) -> None:
    def blocks(pp: int) -> int:
        tokens = kv_tokens(model, 80e9, 0.9, tp, batched_tokens=8192, pp=pp)
        return tokens // BLOCK

    assert blocks(2 * stages) >= 2 * blocks(stages) > 0


# Cost of simulating


def test_a_batch_without_surprises_costs_two_events_an_engine() -> None:
    """1,024 engines with 4 requests each: the iteration that computes the prompts, and a jump to the end."""
    count = 1024
    config = EngineConfig(max_model_len=1024, kv_blocks=4096)
    specs = [EngineSpec(f"engine {index}", config, AffineCost(STEP)) for index in range(count)]
    made = [Request(number, 0, 512, 128) for number in range(4 * count)]
    cluster = SimCluster(specs, Requests(lambda: made, {}), policy_named("round-robin"))
    cluster.run()
    assert [engine.events for engine in cluster.engines] == [2] * count
    assert [engine.iterations for engine in cluster.engines] == [128] * count
    assert {(it.status, it.finish) for it in cluster.requests} == {("finished", 128 * STEP)}


# What cannot run is refused before it does


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_blocks": 63}, r"kv_blocks is 63: 1008 tokens, less than one request of max_model_len 1024; give more"),
        ({"block_size": 0}, "block_size is 0; set it to 1 or more"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; set it to 1 or more"),
        ({"max_num_batched_tokens": 63}, r"max_num_batched_tokens is 63, less than max_num_seqs 64.*raise it"),
        ({"capture_sizes": (1, 2, 4096)}, r"capture_sizes goes to 4096, more than max_num_batched_tokens 2048.*leave"),
        ({"capture_sizes": (4, 2)}, r"capture_sizes is \(4, 2\); list rising numbers"),
        ({"policy": "shortest"}, "policy is 'shortest'; set it to fcfs or priority"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 512}, "not cut in chunks"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0"),
    ],
)
def test_a_misconfigured_engine_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda spec, none: policy_named("fastest"), "policy is 'fastest'; choose one of round-robin"),
        (lambda spec, none: SimCluster([], none), "engines is empty"),
        (lambda spec, none: SimCluster([spec, replace(spec, name="b")], none), "2 engines and no policy"),
        (lambda spec, none: SimCluster([spec, spec], none, policy_named("round-robin")), "have the name engine"),
        (lambda spec, none: SimCluster([replace(spec, bucket=1)], none), "bucket 1"),
        (lambda spec, none: AffineCost(0), "set it to 1 or more"),
        (lambda spec, none: GridCost(GRID, config_of(max_model_len=20_000, kv_blocks=2000)), "max_model_len 20000"),
        (lambda spec, none: HostCost(-1.0), "finite and 0 or more"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_reason(
    make: Callable[[EngineSpec, Requests], object], message: str
) -> None:
    spec = EngineSpec("engine", config_of(), AffineCost(STEP))
    with pytest.raises(ValueError, match=message):
        make(spec, Requests(lambda: [], {}))
