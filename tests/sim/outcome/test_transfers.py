"""KV that was handed over: what the links carried is what was pulled, and a first token waits for its parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.route.baselines import RoundRobin
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import DECODE, PREFILL, EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.kv_network import KVNetwork
from libra.sim.outcome.metrics import metrics_of
from libra.sim.outcome.over_time import mean_present, mean_present_by
from libra.sim.outcome.result import result_of
from libra.sim.outcome.transfer_metrics import (
    PULLED_TTFT,
    PUSHED_TTFT,
    finished_transfers,
    transfer_metrics,
    ttft_parts,
)
from libra.sim.outcome.transfers import link_use
from libra.sim.workload.distributions import LogNormal, Poisson
from libra.sim.workload.generated import generated_requests

COST = AffineCost(8 * 10**9, 20 * 10**6, 40_000, 25 * 10**6)
INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=12)


def cluster(
    *,
    bandwidth: float = 4e9,
    latency: float = 1e-3,
    limit: float | None = None,
    failing: float | None = None,
    push: bool = False,
) -> SimCluster:
    """Two engines of two GPUs compute prompts, three of one generate; the first of them may die at a second."""
    config = EngineConfig(max_model_len=4096, kv_blocks=1200, max_num_seqs=32)
    specs = [EngineSpec(f"p{place}", config, COST, role=PREFILL, devices=2) for place in range(2)]
    reserving = replace(config, num_reserved_decode_tokens=512 if push else 0)
    specs += [EngineSpec(f"d{place}", reserving, COST, role=DECODE, kv_bytes=1e6) for place in range(3)]
    made = SimCluster(
        specs,
        generated_requests(60, Poisson(20.0), LogNormal(300, 0.8, 3000), LogNormal(40, 0.8, 400), 3),
        RoundRobin(),
        kv_transfer=KVNetwork(bandwidth, latency, push=push),
        decode_route=RoundRobin(),
        time_limit=None if limit is None else round(limit * TICKS),
    )
    if failing is not None:
        made.at(round(failing * TICKS), lambda _: made.close("p0"))
    made.run()
    return made


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("case", [{}, {"limit": 2.0}, {"failing": 1.5}, {"latency": 0.0}, {"bandwidth": 1e12}])
def test_links_carry_what_is_transferred(case: dict[str, float], push: bool) -> None:
    """Sent again, the transfers end when they did, and what passed is what was asked for."""
    ran = cluster(**case, push=push)
    result = result_of(ran)
    found, transfers = transfer_metrics(result), result.transfers
    assert found is not None and transfers is not None and ran.pairs is not None
    edges = np.unique(np.linspace(0, result.end + 1, 40).round().astype(np.int64))
    whole = transfers.sent >= 0
    came = int(transfers.size[transfers.came >= 0].sum())
    assert found.bytes == came and found.begun == int((transfers.begun >= 0).sum())
    assert (found.broken > 0) == ("failing" in case)
    for use, moved in zip(link_use(transfers, edges), ran.pairs.moved_bytes, strict=True):
        rates = 4e9 * np.array(transfers.devices) if "bandwidth" not in case else 1e12 * np.array(transfers.devices)
        passed = float((use.used * rates[:, None] * np.diff(edges) / TICKS).sum())
        assert (use.used <= 1 + 1e-9).all()
        if found.broken or not whole.all():
            assert moved - 1 <= passed * (1 + 1e-6)
            assert passed <= transfers.size[transfers.begun >= 0].sum() * (1 + 1e-6)
        else:
            assert passed == pytest.approx(moved, rel=1e-6) and moved == transfers.size.sum()
        during = (np.where(whole, transfers.sent, result.end) - transfers.begun)[transfers.begun >= 0].sum()
        assert (use.sharing * np.diff(edges)).sum() == pytest.approx(during, rel=1e-6)


@pytest.mark.parametrize(("push", "names"), [(False, PULLED_TTFT), (True, PUSHED_TTFT)])
def test_a_first_token_waits_for_its_parts(push: bool, names: tuple[str, ...]) -> None:
    result = result_of(cluster(failing=1.5, push=push))
    found, metrics, requests = transfer_metrics(result), metrics_of(result), result.requests
    assert found is not None and result.transfers is not None
    handed = finished_transfers(requests, result.transfers)
    parts = ttft_parts(requests, result.transfers, handed)
    rows = result.transfers.row[handed]
    assert list(parts) == list(names) == list(found.ttft)
    assert all((ticks >= 0).all() for ticks in parts.values())
    assert (sum(parts.values()) == requests.first_token[rows] - requests.arrival[rows]).all()
    assert metrics.failed and len(handed) == metrics.finished  # who failed is in none of them
    assert found.transfer_alone is not None and found.transfer_alone.mean <= found.ttft["KV transfer"].mean


def test_nobody_looks_at_engines_without_roles() -> None:
    config = EngineConfig(max_model_len=64, kv_blocks=64)
    alone = SimCluster(
        [EngineSpec("e", config, COST)],
        generated_requests(2, Poisson(1.0), LogNormal(10, 0.1, 20), LogNormal(4, 0.1, 9), 3),
    )
    alone.run()
    assert transfer_metrics(result_of(alone)) is None


@given(INTERVALS, st.lists(st.integers(0, 50), min_size=2, max_size=6, unique=True))
def test_means_of_intervals_by_counting_ticks(intervals: list[tuple[int, int, int]], edges: list[int]) -> None:
    begins, ends = (np.array([sorted(it[:2])[place] for it in intervals]) for place in (0, 1))
    weights, owners = np.array([1.0 + it[2] for it in intervals]), np.array([it[2] - 1 for it in intervals])
    edges = sorted(edges)

    def counted(which: np.ndarray) -> list[float]:  # type: ignore[type-arg]
        return [
            sum(weights[(begins <= tick) & (tick < ends) & which].sum() for tick in range(one, other)) / (other - one)
            for one, other in pairwise(edges)
        ]

    everyone = np.ones(len(intervals), bool)
    assert mean_present(begins, ends, np.array(edges), weights) == pytest.approx(counted(everyone), abs=1e-9)
    found = mean_present_by(owners, 2, begins, ends, np.array(edges), weights)
    for owner in range(2):
        assert found[owner] == pytest.approx(counted(owners == owner), abs=1e-9)
