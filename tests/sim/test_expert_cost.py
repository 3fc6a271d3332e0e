"""What experts cost a group: the fullest GPU of each layer, summed one by one; and jumps over moves and draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.cost.expert_grid import ExpertGrid
from libra.cost.experts import Balancing, initial_placement, power_law, rank_shares, rebalanced
from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.route.catalogue import policy_named
from libra.sim.clock import ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.expert_cost import ExpertCost, ExpertLoad
from libra.sim.engine.group_cost import Graph, GroupSpec
from libra.sim.engine.request import Request
from libra.sim.engine.speculative import Speculative
from libra.sim.workload.requests import Requests

OWN = EngineGrid(1, (1, 64), (1, 512), ((1e-3, 2e-3), (2e-3, 9e-3)), (1, 256), (0, 512), ((1e-3, 2e-3), (5e-3, 7e-3)))
GRID = ExpertGrid(
    own=OWN,
    layers=3,
    gpus=4,
    tokens=(1, 64, 512),
    experts=(2e-5, 5e-5, 4e-4),
    exchange=(1e-5, 2e-5, 1e-4),
    expert_bytes=1e6,
    link=1e10,
    source="test",
)
CONFIG = EngineConfig(
    max_model_len=512, kv_blocks=200, max_num_seqs=16, max_num_batched_tokens=256, capture_sizes=(4, 8, 16)
)
DRAFTS = Speculative("mtp", 3, (0.9, 0.5, 0.2))
BALANCING = Balancing(num_redundant_experts=4, window_size=20, step_interval=40)


def load(*, phase: int | None = None, drawn: int | None = None) -> ExpertLoad:
    return ExpertLoad(lambda number: power_law(16, 2, 1.2, 3, seed=number), 2, phase, drawn)


def test_each_layer_waits_for_its_fullest_gpu() -> None:
    shares = rank_shares(power_law(16, 2, 1.2, 3, seed=0), initial_placement(16, 16, 3), 4)
    tokens = [100 * max(row) for row in shares]
    wanted = sum(np.interp(it, GRID.tokens, GRID.experts) + np.interp(it, GRID.tokens, GRID.exchange) for it in tokens)
    found = ExpertCost(GRID, CONFIG, load()).together(Graph("NONE"), 100, 25, 0.0, 7)
    assert found.lines == ((1, ticks(float(wanted))),)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_host_of_the_rank_with_most_requests_takes_longest(overlapped: bool) -> None:
    """However many tokens these have, and other ranks."""
    host = HostCost(iteration=2.0, request=0.5, eager=7.0, overlapped=overlapped)
    device = ExpertCost(GRID, CONFIG, load()).together(Graph("NONE"), 100, 3, 0.0, 7).lines[0][1]
    lines = ExpertCost(GRID, CONFIG, load(), host=host).together(Graph("NONE"), 100, 3, host.seconds(3), 7).lines
    assert lines == (((1, device), (0, ticks(7.0))) if overlapped else ((1, device + ticks(3.5)), (0, ticks(10.5))))


def test_moves_are_paid_once_and_make_the_fullest_less_full() -> None:
    cost = ExpertCost(GRID, CONFIG, load(), BALANCING)
    first = BALANCING.moved_at(1)
    assert first == 10
    before, moving, after = (cost.together(Graph("NONE"), 100, 25, 0.0, it) for it in (first - 1, first, first + 1))
    assert before.holds == moving.holds == 1
    assert after.holds == 39
    assert moving.lines[0][1] > after.lines[0][1]
    assert cost.fullest(first) < cost.fullest(first - 1)
    again = cost.together(Graph("NONE"), 100, 25, 0.0, first + 40)
    assert again.lines == after.lines  # nothing has to be moved again


def test_balance_follows_the_load_of_the_window() -> None:
    cost = ExpertCost(GRID, CONFIG, load(phase=30), BALANCING)
    at = BALANCING.moved_at(2)  # 50: the window has the iterations 30 to 49, all of the second phase
    placement = initial_placement(16, 20, 3)
    window = power_law(16, 2, 1.2, 3, seed=0)
    for seed in (0, 1):
        window = power_law(16, 2, 1.2, 3, seed=seed)
        placement = rebalanced(window, placement, 4)
    assert cost.fullest(at) == pytest.approx(float(rank_shares(window, placement, 4).max(axis=1).mean()) * 4)


def test_the_first_window_begins_with_the_first_iteration() -> None:
    """The first move comes before the second iteration, and the load changes with every iteration."""
    cost = ExpertCost(GRID, CONFIG, load(phase=1), replace(BALANCING, step_interval=4))
    placement = rebalanced(power_law(16, 2, 1.2, 3, seed=0), initial_placement(16, 20, 3), 4)
    now = rank_shares(power_law(16, 2, 1.2, 3, seed=1), placement, 4)
    assert cost.fullest(1) == pytest.approx(float(now.max(axis=1).mean()) * 4)


def test_a_drafter_with_experts_passes_them_too() -> None:
    """Of one layer: all tokens once, and then one of each request, as many as on the rank with most."""
    config = replace(CONFIG, speculative=DRAFTS)

    def of(requests: int, **drafter: bool) -> int:
        cost = ExpertCost(GRID, config, load(), drafter=OWN.slowed(0.1), **drafter)  # type: ignore[arg-type]
        return cost.together(Graph("FULL", 48), 192, requests, 0.0, 0).lines[0][1]

    layers = of(12)
    fewer = ExpertCost(GRID, config, load()).together(Graph("NONE"), 48, 0, 0.0, 0).lines[0][1]
    assert of(12, draft_experts=True) - layers == (layers + 2 * fewer) // 3


@pytest.mark.parametrize("drafts", [None, DRAFTS])
@pytest.mark.parametrize("phase", [None, 7])
@pytest.mark.parametrize("drawn", [None, 3])
def test_jumps_pass_moves_and_draws(phase: int | None, drawn: int | None, drafts: Speculative | None) -> None:
    def run(exact: bool) -> tuple[list[tuple[int | None, int | None]], int]:
        config = replace(CONFIG, speculative=drafts)
        cost = ExpertCost(GRID, config, load(phase=phase, drawn=drawn), BALANCING, draft_experts=drafts is not None)
        group = GroupSpec("group", cost)
        specs = [EngineSpec(f"rank {it}", config, cost.rank(Graph("NONE")), group=group) for it in range(4)]
        made = [Request(it, ticks(it * 2e-3), 5 + 37 * it % 90, 1 + 53 * it % 120) for it in range(60)]
        cluster = SimCluster(specs, Requests(lambda: made, {}), policy_named("round-robin"), exact=exact)
        cluster.run()
        return [(it.first_token, it.finish) for it in cluster.requests], sum(it.events for it in cluster.engines)

    jumping, events = run(exact=False)
    visiting, all_events = run(exact=True)
    assert jumping == visiting
    assert events < all_events or drawn is not None


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_redundant_experts is 3: 19 experts are not a multiple of 4 GPUs"):
        ExpertCost(GRID, CONFIG, load(), replace(BALANCING, num_redundant_experts=3))
