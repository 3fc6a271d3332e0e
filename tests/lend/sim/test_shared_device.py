"""A device that two simulated engines share: alone it is the engine, and with the gate its bound holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from libra.lend.gate import Gate, ServingView, ttft_bound, ttft_queue
from libra.lend.recall import Recall, RecallPolicy, WatchedRule
from libra.lend.rules import Alternate, NoLending, PositiveSlack, ServeFirst
from libra.lend.sim.shared_device import RolloutBorrower, SharedDevice, SpendsAll
from libra.lend.sim.tenant import EngineServingCost, ServingTenant, misses
from libra.lend.traffic.envelope import Envelope
from libra.sim.clock import TICKS, seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost, DecodeBatch
from libra.sim.engine.request import Request
from libra.sim.workload.requests import RecordedRequest, recorded_requests

MS = ticks(0.001)
COST = AffineCost(step=5 * MS, per_sequence=MS // 4, per_context_token=MS // 1000, per_new_token=MS // 20)
CHUNK = 128


def engine(blocks: int = 4096, cost: AffineCost = COST) -> EngineSpec:
    return EngineSpec("serving", EngineConfig(1024, blocks, max_num_seqs=64, max_num_batched_tokens=CHUNK), cost)


TRAFFIC = st.lists(
    st.builds(RecordedRequest, st.integers(0, 2000).map(lambda at: at * MS), st.integers(1, 500), st.integers(1, 40)),
    min_size=1,
    max_size=20,
).map(lambda found: sorted(found, key=lambda it: it.arrival))


def replay(records: list[RecordedRequest]) -> list[Request]:
    return list(recorded_requests(records).start())


def outcome(request: Request) -> tuple[int | None, int | None, int]:
    return request.first_token, request.finish, request.generated


@settings(max_examples=60, deadline=None)
@given(records=TRAFFIC, blocks=st.sampled_from([64, 4096]))  # with 64 blocks requests are preempted
def test_without_lending_it_is_the_engine(records: list[RecordedRequest], blocks: int) -> None:
    spec = engine(blocks)
    cluster = SimCluster([spec], recorded_requests(records))
    cluster.run()
    device = SharedDevice(spec, NoLending(), SpendsAll(), pace=ticks(0.1), prompt=500)
    assert [outcome(it) for it in device.run(replay(records)).requests] == [outcome(it) for it in cluster.requests]


@settings(max_examples=100, deadline=None)
@given(records=TRAFFIC, grant=st.integers(1, 60), slack=st.integers(0, 100), least=st.integers(1, 20))
def test_no_later_token_is_late_and_the_first_is_within_its_bound(
    records: list[RecordedRequest], grant: int, slack: int, least: int
) -> None:
    cost = EngineServingCost(COST, CHUNK, prompt=500)
    longest = cost.longest_step(ServingView(len(records), 0, 0, context=sum(it.prompt_tokens + 40 for it in records)))
    pace, grant = longest + slack * MS, grant * MS
    assume(least * MS <= grant)
    rule = Gate(grant, least * MS)
    found = SharedDevice(engine(), rule, SpendsAll(), pace=pace, prompt=500).run(replay(records))
    assert found.longest_step <= longest
    for request in found.requests:
        assert request.first_token is not None and request.finish is not None
        assert request.finish - request.first_token <= pace * (request.output_tokens - 1)
        ahead = sum(
            it.prompt_tokens
            for it in found.requests
            if it.arrival <= request.arrival and (it.first_token is None or it.first_token >= request.arrival)
        )
        bound = ttft_bound(grant, longest, ahead, CHUNK - len(records))
        assert request.first_token - request.arrival <= bound


@settings(max_examples=100, deadline=None)
@given(
    records=TRAFFIC,
    grant=st.integers(1, 40),
    live=st.integers(1, 12),
    context=st.integers(200, 6000),
    ttft=st.floats(0.1, 1),
)
def test_whoever_its_envelope_covers_is_in_time(
    records: list[RecordedRequest], grant: int, live: int, context: int, ttft: float
) -> None:
    cost, grant = EngineServingCost(COST, CHUNK, prompt=500), grant * MS
    longest = cost.longest_step(ServingView(live, 0, 0, context=context))
    queue = ttft_queue(ticks(ttft), grant, longest, CHUNK - live)
    assume(queue > 0)
    pace = longest + 5 * MS
    inside = Envelope(1e9, queue, live, context, 60.0)
    rule = WatchedRule(Gate(grant, MS), inside, Recall(RecallPolicy(0.1, 0.4)), float(TICKS))
    found = SharedDevice(engine(), rule, SpendsAll(), pace=pace, prompt=500).run(replay(records))
    covered = [it for it in found.requests if it.number not in found.uncovered]
    assert not misses(covered, ttft, seconds(pace)).any
    if len(covered) == len(records):
        assert found.margin is None or found.margin >= 0
    if found.most_live <= live and found.most_context <= context and found.most_queued <= queue:
        assert len(covered) == len(records)


@given(st.integers(1, 10_000), st.integers(1, 300), st.integers(1, 500), st.integers(1, 600))
def test_the_longest_queue_is_where_the_bound_still_holds(ttft: int, grant: int, step: int, prefill: int) -> None:
    queue = ttft_queue(ttft, grant, step, prefill)
    if queue > 0:
        assert ttft_bound(grant, step, queue, prefill) <= ttft
    assert ttft_bound(grant, step, max(queue, 0) + 1, prefill) > ttft


@settings(max_examples=60, deadline=None)
@given(records=TRAFFIC, pace=st.integers(1, 60), blocks=st.sampled_from([400, 4096]))
def test_the_margin_is_that_of_the_closest_token(records: list[RecordedRequest], pace: int, blocks: int) -> None:
    """Against every token of every step, where nobody is preempted."""
    tenants = [ServingTenant(engine(blocks), replay(records), pace=pace * MS, prompt=500) for _ in range(2)]
    stepwise, together = tenants
    now, margins, tokens = 0, [math.inf], dict[Request, int]()
    while stepwise.next_arrival is not None or stepwise.busy:
        stepwise.arrive(now)
        end = stepwise.step(now)
        if end is None:
            now = max(now, stepwise.next_arrival or now)
            continue
        for request in stepwise.came:
            made = request.generated if request.finish else stepwise.engine.generated_by(request, end)
            before, tokens[request] = tokens.get(request, 0), made
            if made > before >= 1:
                assert request.first_token is not None
                margins.append(request.first_token + before * pace * MS - end)
        now = end
    now = 0
    while together.next_arrival is not None or together.busy:
        together.arrive(now)
        end = together.steps_until(now, 1 << 60)
        now = max(now, together.next_arrival or now) if end is None else end
    assert not stepwise.engine.preemptions
    assert stepwise.margin == together.margin == min(margins)


@pytest.mark.parametrize(
    "rule", [ServeFirst(20 * MS), Alternate(20 * MS), PositiveSlack(20 * MS, ticks(0.2)), Gate(20 * MS, MS)]
)
def test_rollout_stays_within_its_grants_and_counts_its_tokens(rule) -> None:
    spent: list[tuple[int, int]] = []

    class Watched(RolloutBorrower):
        def spend(self, now: int, grant: int) -> int:
            spent.append((grant, super().spend(now, grant)))
            return spent[-1][1]

    rollout = EngineSpec("rollout", EngineConfig(1024, 512, max_num_seqs=8, max_num_batched_tokens=64), COST)
    turns: list[Request] = []

    def next_turn(number: int, now: int) -> Request:
        turns.append(Request(10**6 + number, now, 30 + 7 * (number % 13), 5 + number % 9))
        return turns[-1]

    borrower = Watched(rollout, 8, next_turn)
    arrivals = [*range(0, 1000, 40), *range(1000, 5000, 500)]  # busy, then often idle
    records = [RecordedRequest(at * MS, 100, 10) for at in arrivals]
    found = SharedDevice(engine(), rule, borrower, pace=ticks(0.05), prompt=100).run(replay(records))
    assert all(0 <= used <= grant for grant, used in spent)
    assert found.lent == sum(used for _, used in spent) > 0
    assert found.serving + found.lent <= found.end
    lent = borrower.engine
    running = {it.number for it in lent.unfinished}
    made = [lent.generated_by(it, found.end) if it.number in running else it.generated for it in turns]
    assert borrower.generated == sum(made)


def test_in_a_short_grant_those_decode_that_can() -> None:
    rollout = EngineSpec("rollout", EngineConfig(1024, 512, max_num_seqs=8, max_num_batched_tokens=64), COST)
    borrower, now = RolloutBorrower(rollout, 8, lambda number, now: Request(number, now, 30, 500)), 0
    while borrower.engine.flight.generation.count < 8:
        now += borrower.spend(now, 50 * MS)
    before = [borrower.engine.generated_by(it, now) for it in borrower.engine.running]
    context, made = borrower.engine.flight.generation.context, borrower.generated
    for fits in (8, 3, 0):
        grant = COST.line(DecodeBatch(fits), 0)[0] + COST.per_context_token * context
        spent = borrower.spend(now, grant if fits else grant - 1)
        assert (0 < spent <= grant) if fits else spent == 0
        after = [borrower.engine.generated_by(it, now + spent) for it in borrower.engine.running]
        assert [new - old for new, old in zip(after, before, strict=True)] == [1] * fits + [0] * (8 - fits)
        assert borrower.generated - made == fits
        before, made, now, context = after, borrower.generated, now + spent, context + 8


def test_what_is_missed() -> None:
    def served(number: int, first: float, finish: float, tokens: int) -> Request:
        request = Request(number, 0, 10, tokens)
        request.first_token, request.finish = ticks(first), ticks(finish)
        return request

    requests = [
        served(0, 0.5, 0.9, 5),
        served(1, 0.501, 0.9, 5),
        served(2, 0.5, 0.9001, 5),
        served(3, 0.2, 0.2, 1),
        Request(4, 0, 10, 5),
    ]
    found = misses(requests, ttft=0.5, tpot=0.1)
    assert (found.ttft, found.tpot, found.any) == ({1, 4}, {2, 4}, {1, 2, 4})
