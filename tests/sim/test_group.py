"""Ranks with one clock: jumping changes nothing that happens, and each iteration lasts as long as the slowest needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cluster_equality import LONGEST, STEP, Scenario, assert_equal, costs, scenarios

from libra.cost.host import NO_HOST, HostCost
from libra.route.baselines import RoundRobin
from libra.route.catalogue import policy_named
from libra.route.policy import Fleet, Placement, TurnRequest
from libra.sim.cluster import SimCluster
from libra.sim.deployment import Deployment, WeightUpdate
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.group_cost import Graph, GroupSpec, MicroBatching, Together
from libra.sim.engine.iteration_cost import UNLIMITED, AffineCost, IterationCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.rank import Rank
from libra.sim.engine.request import Request
from libra.sim.rank_balancer import RankBalancer
from libra.sim.workload.replay import Replay
from libra.sim.workload.requests import Requests
from libra.trajectory import Trajectory, Turn
from tests.oracles.fidelity.variants import with_drafts


@dataclass(frozen=True)
class DrawnGroupCost:
    """Ranks that cost more with a larger graph, and something together that changes every so many iterations. Seconds
    of the host are ticks."""

    cost: IterationCost
    per_padding: int
    per_token: int
    factors: tuple[tuple[int, int], ...]  # (factor, ticks) beside what tokens take
    every: int | None
    host: HostCost = NO_HOST

    def rank(self, graph: Graph) -> IterationCost:
        return self.cost

    def together(self, graph: Graph, tokens: int, requests: int, cpu: float, iteration: int) -> Together:
        more = 0 if self.every is None else 3 * (iteration // self.every % 2)
        more += self.per_padding * graph.size + self.per_token * tokens + int(cpu) + 7 * graph.whole
        holds = UNLIMITED if self.every is None else self.every - iteration % self.every
        return Together(tuple((factor, ticks + more) for factor, ticks in self.factors), holds)


@st.composite
def groups(draw: st.DrawFn, lattice: bool, *, closed: bool, drafts: bool = False) -> Scenario:
    """A scenario whose engines are one group or two, and maybe one that is none's. With `drafts` ranks have some."""
    scenario = draw(scenarios(closed=closed, lattice=lattice))
    first = scenario.specs[0]
    made: list[EngineSpec] = []
    for number in range(draw(st.integers(1, 2))):
        cost: IterationCost = draw(costs(lattice))
        together = DrawnGroupCost(
            cost,
            draw(st.integers(0, 3)),
            draw(st.integers(0, 3)),
            ((1, 0),)
            if lattice
            else draw(st.sampled_from([((1, 0),), ((1, 50), (2, 0)), ((0, 600), (1, 0), (3, -700))])),
            draw(st.none() | st.integers(1, 9)),
            draw(st.sampled_from([NO_HOST, HostCost(5.0, 3.0, False, 50.0, 1.0, 2.0)])),
        )
        sizes = draw(st.sampled_from([(), (1, 2, 4), (2, first.config.max_num_batched_tokens)]))
        config = replace(
            first.config,
            capture_sizes=tuple(sorted({it for it in sizes if it <= first.config.max_num_batched_tokens})),
            async_scheduling=draw(st.booleans()),
        )
        if drafts:
            config = with_drafts(config, draw(st.integers(0, 99)))
        parts = draw(st.sampled_from([None, MicroBatching(2, 2, 2), MicroBatching(3, 4, 20)]))
        group = GroupSpec(f"group {number}", together, draw(st.integers(1, 16)), parts)
        made += [
            EngineSpec(f"rank {number}.{place}", config, cost, first.bucket, group=group)
            for place in range(draw(st.integers(1, 5)))
        ]
    if draw(st.booleans()):
        made.append(EngineSpec("alone", first.config, first.cost, first.bucket))
    updates = tuple(replace(it, engines=None) for it in scenario.updates)
    return replace(scenario, specs=tuple(made), updates=updates)


@settings(max_examples=60, deadline=None)
@given(groups(lattice=False, closed=True))
def test_groups_in_closed_loops(scenario: Scenario) -> None:
    assert_equal(scenario)


@settings(max_examples=60, deadline=None)
@given(groups(lattice=True, closed=True))
def test_groups_in_closed_loops_where_everything_is_a_tie(scenario: Scenario) -> None:
    assert_equal(scenario)


@settings(max_examples=60, deadline=None)
@given(groups(lattice=False, closed=False))
def test_groups_in_open_loops(scenario: Scenario) -> None:
    assert_equal(scenario)


@settings(max_examples=60, deadline=None)
@given(groups(lattice=True, closed=False))
def test_groups_in_open_loops_where_everything_is_a_tie(scenario: Scenario) -> None:
    assert_equal(scenario)


@settings(max_examples=60, deadline=None)
@given(groups(lattice=False, closed=True, drafts=True))
def test_groups_with_drafts_in_closed_loops(scenario: Scenario) -> None:
    assert_equal(scenario)


@settings(max_examples=60, deadline=None)
@given(groups(lattice=True, closed=False, drafts=True))
def test_groups_with_drafts_in_open_loops_where_everything_is_a_tie(scenario: Scenario) -> None:
    assert_equal(scenario)


def run_with_a_death(tick: int, exact: bool) -> tuple[list[tuple[int, str, int | None, int | None]], SimCluster]:
    """Two groups of three ranks; one rank of the first dies."""
    cost = DrawnGroupCost(AffineCost(STEP, 3, 1, 5), 2, 1, ((1, 0),), None)
    config = EngineConfig(max_model_len=LONGEST, kv_blocks=2 * LONGEST, max_num_seqs=4, capture_sizes=(2, 4))
    specs = [
        EngineSpec(f"rank {number}.{place}", config, cost.cost, group=GroupSpec(f"group {number}", cost))
        for number in range(2)
        for place in range(3)
    ]
    made = [Request(number, 40 * number, 5 + number % 30, 1 + 7 * number % 40) for number in range(40)]
    cluster = SimCluster(specs, Requests(lambda: made, {}), policy_named("round-robin"), exact=exact)
    cluster.at(tick, lambda _: cluster.close("rank 0.1"))
    cluster.run()
    return [(it.number, it.status, it.engine, it.finish) for it in cluster.requests], cluster


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6000))
def test_with_a_rank_its_group_dies_and_nothing_is_lost(tick: int) -> None:
    told, cluster = run_with_a_death(tick, exact=False)
    assert told == run_with_a_death(tick, exact=True)[0]
    assert all(engine.closed and not engine.unfinished for engine in cluster.engines[:3])
    assert all(engine.pool.free == engine.config.kv_blocks for engine in cluster.engines)
    finished = {number for number, status, _, _ in told if status == "finished"}
    rest = [it for it in cluster.requests if it.status == "interrupted"]
    assert len(told) == 40 + len(rest) and len(finished) == 40


@pytest.mark.parametrize("blocks", [LONGEST, 4 * LONGEST])
def test_requests_go_to_the_rank_that_vllm_would_choose(blocks: int) -> None:
    """Beside a full one that has a queue; and what ranks hold is the same in jumps."""
    placed = []
    for exact in (False, True):
        cost = DrawnGroupCost(AffineCost(STEP, 3, 1, 5), 2, 1, ((1, 0),), None)
        config = EngineConfig(max_model_len=LONGEST, kv_blocks=blocks, block_size=1, max_num_seqs=2)
        group = GroupSpec("group", cost)
        specs = [EngineSpec(f"rank {it}", config, cost.cost, group=group) for it in range(3)]
        made = [Request(it, 400 * it, 10 + 31 * it % 70, 1 + 17 * it % 60) for it in range(60)]
        cluster = SimCluster(specs, Requests(lambda made=made: made, {}), RankBalancer(), exact=exact)  # type: ignore[misc]
        cluster.run()
        placed.append([(it.engine, it.finish) for it in cluster.requests])
    assert placed[0] == placed[1]
    assert [engine for engine, _ in placed[0][:3]] == [0, 1, 2]


class Looking(RoundRobin):
    """Is asked about each request when it has 5 tokens, looks at all engines, and lets it go on."""

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        found = super().place(request, fleet)
        return None if found is None else replace(found, ask_again=5)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        assert all(it.kv_usage > 0 and it.token_seconds > 0 for it in fleet.instances)
        return None


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_who_is_asked_at_a_boundary_may_look_at_all_ranks(exact: bool, ahead: bool) -> None:
    """Also at one that has not counted yet what ended there: it is counted once."""
    config = EngineConfig(max_model_len=LONGEST, kv_blocks=LONGEST, async_scheduling=ahead)
    cost = DrawnGroupCost(AffineCost(STEP), 0, 0, ((1, 0),), None)
    specs = [EngineSpec(f"rank {it}", config, cost.cost, group=GroupSpec("group", cost)) for it in range(2)]
    made = [
        Trajectory(str(it), "p", "t", 5, (Turn(tokens, None, None, 0),), None, 0, finished=True)
        for it, tokens in enumerate((9, 30))
    ]
    iterations: list[Iteration] = []
    cluster = SimCluster(specs, Replay(made), Looking(), exact=exact, trace=iterations.append)
    cluster.run()
    assert [it.finish for it in cluster.requests] == [9 * STEP, 30 * STEP]
    computed = Counter(number for it in iterations for number, _ in it.scheduled)
    assert computed == {0: 9 + ahead, 1: 30 + ahead}  # ahead: one row in vain


def two_ranks(tokens: int, *, ahead: bool, exact: bool, cancel_at: int | None = None) -> tuple[int, list[int]]:
    """When two ranks stop of which one has a request of so many tokens, and the dummy batches of each. They look with
    the first step and each fourth."""
    config = EngineConfig(max_model_len=LONGEST, kv_blocks=LONGEST, async_scheduling=ahead)
    cost = DrawnGroupCost(AffineCost(STEP), 0, 0, ((1, 0),), None)
    group = GroupSpec("group", cost, 4)
    specs = [EngineSpec(f"rank {it}", config, cost.cost, group=group) for it in range(2)]
    made = [Request(0, 0, 5, tokens, cancel_at=cancel_at)]
    cluster = SimCluster(specs, Requests(lambda: made, {}), policy_named("round-robin"), exact=exact)
    cluster.run()
    assert made[0].finish == (cancel_at or tokens * STEP)
    return cluster.now, [engine.dummies for engine in cluster.engines if isinstance(engine, Rank)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("tokens", "ahead", "stop"),
    [
        (3, False, 4),
        (4, False, 4),
        (5, False, 8),
        (3, True, 4),  # the fourth step sees the third iteration end, and has decided the fourth
        (4, True, 8),  # the last token is under way then
        (5, True, 8),
    ],
)
def test_a_group_stops_with_the_step_that_sees_nobody_have_work(
    tokens: int, ahead: bool, stop: int, exact: bool
) -> None:
    assert two_ranks(tokens, ahead=ahead, exact=exact) == (stop * STEP, [stop - tokens, stop])


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_given_up_at_a_boundary_is_there_for_the_step_that_ends_with_it(exact: bool) -> None:
    """In the middle of a jump, too."""
    assert two_ranks(10, ahead=False, exact=exact, cancel_at=4 * STEP) == (8 * STEP, [4, 8])


@pytest.mark.parametrize("exact", [False, True])
def test_all_wait_for_the_host_that_takes_longest(exact: bool) -> None:
    """One rank admits two short prompts, the other a long one."""
    config = EngineConfig(max_model_len=LONGEST, kv_blocks=LONGEST)
    cost = DrawnGroupCost(AffineCost(STEP), 0, 0, ((1, 0),), None, HostCost(0.0, 3.0, False, 50.0, 1.0))
    specs = [EngineSpec(f"rank {it}", config, cost.cost, group=GroupSpec("group", cost)) for it in range(2)]
    made = [Request(number, 0, tokens, 2) for number, tokens in enumerate((5, 80, 6))]
    SimCluster(specs, Requests(lambda: made, {}), policy_named("round-robin"), exact=exact).run()
    short, long = 3 * 2 + 50 * 2 + 11, 3 + 50 + 80
    assert {it.first_token for it in made} == {STEP + max(short, long)}
    assert {it.finish for it in made} == {2 * STEP + max(short, long) + 3 * 2}


def test_ranks_of_a_group_are_alike() -> None:
    cost = DrawnGroupCost(AffineCost(STEP), 0, 0, ((1, 0),), None)
    config = EngineConfig(max_model_len=LONGEST, kv_blocks=LONGEST)
    group = GroupSpec("g", cost)
    rank = EngineSpec("rank 0", config, cost.cost, group=group)

    def refused(other: EngineConfig, updates: tuple[WeightUpdate, ...] = ()) -> str:
        with pytest.raises(ValueError) as error:
            Deployment(
                tuple(replace(rank, name=f"rank {it}", config=other if it else config) for it in (0, 1)),
                updates=updates,
            )
        return str(error.value)

    assert refused(replace(config, max_num_seqs=3)) == "the ranks of group g differ in their settings: make them equal"
    update = WeightUpdate(0, 1, engines=frozenset({1}))
    assert "pauses as a whole" in refused(config, (update,))
