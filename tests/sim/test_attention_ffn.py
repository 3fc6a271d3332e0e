"""Attention and FFN apart: an iteration is a ring of micro-batches, and jumping over iterations changes nothing."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.micro_batches import alike_makespan, makespan
from test_cluster_equality import assert_equal
from test_group import groups

from libra.cost.afd import StageGrid
from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.route.baselines import RoundRobin
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.afd import AfdCost, AttentionFFN, attention_ranks
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.group_cost import Graph, GroupSpec
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engine.request import Request
from libra.sim.workload.requests import Requests

CONFIG = EngineConfig(max_model_len=2048, kv_blocks=400, max_num_seqs=16, max_num_batched_tokens=512)
GRAPH = Graph("NONE")


def stages(attention: float = 1e-6, per_context: float = 1e-9, ffn: float = 2e-6, dense: int = 0) -> StageGrid:
    """Of 8 layers with experts: seconds of a layer for each request, token of context, and token of all ranks."""
    batches, contexts, chunks, prefixes = (1, 128), (64, 2048), (1, 64, 512), (0, 2048)
    decode = tuple(tuple(8 * (1e-5 + attention * b + per_context * b * c) for c in contexts) for b in batches)
    prefill = tuple(tuple(8 * (1e-5 + attention * c + per_context * c * (p + c / 2)) for p in prefixes) for c in chunks)
    return StageGrid(
        attention=EngineGrid(1, batches, contexts, decode, chunks, prefixes, prefill),
        layers=8,
        dense=dense,
        tokens=(1, 4096),
        outside=(3e-6, 5e-5),
        head=(3e-6, 5e-5),
        experts=(5e-6 + ffn, 5e-6 + 4096 * ffn),
        ffn=2,
        token_bytes=4096.0,
        source="made up",
    )


def iteration(cost: AfdCost, own: int, tokens: int) -> int:
    together = cost.together(GRAPH, tokens, tokens // 4, cost.host.seconds(tokens // 4), 0)
    return max(factor * own + more for factor, more in together.lines)


def test_an_iteration_is_the_visited_ring_of_its_stages() -> None:
    random = Random(5)
    for _ in range(300):
        count, dense = random.randint(1, 5), random.randint(0, 2)
        made = stages(ffn=random.choice((1e-8, 1e-6, 1e-5)), dense=dense)
        serial = random.random() < 0.5
        afd = AttentionFFN(4, 2, random.choice((1e8, 1e9, 1e11)), random.choice((0, 1e-5)), count, serial)
        cost = AfdCost(made, CONFIG, afd)
        requests, tokens = random.randint(1, 16), random.randint(4, 64)
        base, slope, _ = cost.rank(GRAPH).line(DecodeBatch(requests), 100 * requests)
        own = base + slope * 100 * requests
        ffn, link = cost.stages(tokens, count)
        ring = ([own] * count, [link] * count, [ffn] * count, [link] * count)
        outside = round(made.outside_seconds(tokens / 4) * TICKS)
        wanted = makespan(ring, (True, serial, True, serial), made.layers) + dense * count * own + outside
        assert iteration(cost, own, tokens) == wanted


def test_a_micro_batch_has_its_share_of_a_ranks_requests_and_contexts() -> None:
    one, four = (AfdCost(stages(), CONFIG, AttentionFFN(4, 2, 1e9, 0.0, count)) for count in (1, 4))
    base, slope, _ = one.rank(GRAPH).line(DecodeBatch(4), 4 * 1000)
    shared, per_token, _ = four.rank(GRAPH).line(DecodeBatch(16), 16 * 1000)
    assert shared + per_token * 16 * 1000 == pytest.approx(base + slope * 4 * 1000, rel=1e-4)


def test_a_batch_below_the_threshold_goes_round_whole() -> None:
    """As if there was one micro-batch; and so does one of which a rank has too little."""
    parts = AttentionFFN(4, 2, 1e9, 0.0, 2, True, 8, 300)
    cost, one = AfdCost(stages(), CONFIG, parts), AfdCost(stages(), CONFIG, AttentionFFN(4, 2, 1e9, 0.0, 1))
    whole, batch = Graph("NONE", whole=True), DecodeBatch(5)
    assert cost.rank(whole).line(batch, 600) == one.rank(GRAPH).line(batch, 600)
    assert cost.together(whole, 20, 5, 0.0, 0) == one.together(GRAPH, 20, 5, 0.0, 0)
    assert cost.together(GRAPH, 20, 5, 0.0, 0) != one.together(GRAPH, 20, 5, 0.0, 0)
    rule = attention_ranks(EngineSpec("afd", CONFIG, cost.own), cost)[0].group
    assert rule is not None and rule.micro_batching is not None
    divides = rule.micro_batching
    assert [divides.wanted(tokens, uniform=True) for tokens in (7, 8)] == [False, True]
    assert [divides.wanted(tokens, uniform=False) for tokens in (299, 300)] == [False, True]
    assert divides.fills(9, 16) and not divides.fills(8, 16)


def test_an_empty_micro_batch_is_padded_to_a_token_of_each_rank() -> None:
    whole, divided = (AfdCost(stages(), CONFIG, AttentionFFN(4, 2, 1e9, 1e-6, count)) for count in (1, 3))
    assert divided.stages(4, 3) == divided.stages(12, 3) == whole.stages(4, 1)
    own = 10**6
    assert iteration(divided, own, 4) > iteration(whole, own, 4)


def test_all_that_bounds_an_iteration_is_named() -> None:
    def bound(cost: AfdCost, own: int, tokens: int = 64) -> str:
        together = cost.together(GRAPH, tokens, tokens // 4, cost.host.seconds(tokens // 4), 0)
        return max(zip(together.lines, together.names, strict=True), key=lambda it: it[0][0] * own + it[0][1])[1]

    afd = AttentionFFN(4, 2, 1e12, 0.0, 3)
    assert bound(AfdCost(stages(), CONFIG, afd), 10**9) == "attention"
    assert bound(AfdCost(stages(ffn=1e-4), CONFIG, afd), 10**6) == "ffn"
    assert bound(AfdCost(stages(ffn=1e-8), CONFIG, replace(afd, bandwidth=1e6)), 10**6) == "link"
    assert (
        bound(AfdCost(stages(ffn=1e-8), CONFIG, replace(afd, latency=1.0, serial_links=False)), 10**6) == "round trip"
    )
    host = HostCost(iteration=1.0, overlapped=True)
    assert bound(AfdCost(stages(), CONFIG, afd, host), 10**6) == "host"
    assert iteration(AfdCost(stages(), CONFIG, afd, host), 10**6, 64) == TICKS


def test_a_host_that_is_not_overlapped_comes_to_every_iteration() -> None:
    alone, with_host = (
        AfdCost(stages(), CONFIG, AttentionFFN(4, 2, 1e9), host) for host in (HostCost(), HostCost(1e-3, 1e-4))
    )
    more = iteration(with_host, 10**7, 32) - iteration(alone, 10**7, 32)
    assert more == pytest.approx(TICKS * (1e-3 + 8e-4), abs=1)  # 32 tokens on four ranks


@settings(max_examples=60, deadline=None)
@given(groups(lattice=False, closed=True), st.integers(1, 4), st.sampled_from((1e8, 1e10)), st.booleans())
def test_jumping_over_iterations_changes_nothing(scenario, count: int, bandwidth: float, links: bool) -> None:  # type: ignore[no-untyped-def]
    made: dict[str, GroupSpec] = {}
    for spec in scenario.specs:
        if spec.group is not None:
            least = None if spec.group.micro_batching is None else 4
            afd = AttentionFFN(4, 2, bandwidth, 1e-6, count, links, least, least)
            cost = AfdCost(stages(dense=1), replace(spec.config, capture_sizes=()), afd)
            group = replace(spec.group, cost=cost, micro_batching=afd.micro_batching)
            made.setdefault(spec.group.name, group)
    specs = tuple(it if it.group is None else replace(it, group=made[it.group.name]) for it in scenario.specs)
    assert_equal(replace(scenario, specs=specs))


def simulated(seed: int, *, exact: bool, limit: int | None) -> SimCluster:
    """Requests of mixed lengths on four attention ranks, which stop at a tick."""
    random = Random(seed)
    cost = AfdCost(stages(per_context=3e-9, ffn=random.choice((1e-7, 2e-6))), CONFIG, AttentionFFN(4, 2, 3e9, 0.0, 3))
    group = GroupSpec("afd", cost)
    specs = [EngineSpec(f"afd-{rank}", CONFIG, cost.rank(GRAPH), group=group) for rank in range(4)]
    made = [
        Request(number, random.randrange(10**11), random.randint(1, 900), random.randint(1, 300))
        for number in range(40)
    ]
    made.sort(key=lambda it: (it.arrival, it.number))
    cluster = SimCluster(specs, Requests(lambda: made, {}), RoundRobin(), exact=exact, time_limit=limit)
    cluster.run()
    return cluster


@pytest.mark.parametrize("seed", range(20))
def test_what_bounds_iterations_is_counted_alike_and_adds_up(seed: int) -> None:
    limit = None if seed % 2 else 5 * 10**10 * (1 + seed)
    jumping, visiting = (simulated(seed, exact=exact, limit=limit) for exact in (False, True))
    counted = [cluster.groups[0].bounded(cluster.now) for cluster in (jumping, visiting)]
    assert counted[0] == counted[1] and counted[0].total() > 0
    if limit is None:
        finished = [request.finish for request in jumping.requests]
        assert finished == [request.finish for request in visiting.requests]
        assert counted[0].total() <= jumping.now


def test_more_attention_ranks_than_ffn_ranks_need_the_links_of_ffn() -> None:
    cost = AfdCost(stages(), CONFIG, AttentionFFN(8, 2, 1e9, 0.0, 1), tp=2)
    assert cost.stages(100, 1)[1] == round(100 * 4096 / (2 * 1e9) * TICKS)


def test_closed_form_of_the_lines_is_that_of_micro_batches() -> None:
    cost = AfdCost(stages(), CONFIG, AttentionFFN(4, 2, 1e9, 1e-6, 3))
    ffn, link = cost.stages(48, 3)
    wanted = alike_makespan((777_777, link, ffn, link), (True,) * 4, 3, 8) + round(stages().outside_seconds(12) * TICKS)
    assert iteration(cost, 777_777, 48) == wanted
