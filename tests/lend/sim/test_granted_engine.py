"""A rollout engine on grants: what a shared device does step by step, the cluster does in runs of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.lend.gate import Gate, SharingRule, Slo
from libra.lend.recall import Recall, RecallPolicy, WatchedRule
from libra.lend.rules import Alternate, PositiveSlack, ServeFirst
from libra.lend.sim.granted_engine import GrantedEngine, LenderDevice
from libra.lend.sim.kv_loan import KVLoan, KVTerms
from libra.lend.sim.shared_device import RolloutBorrower, SharedDevice
from libra.lend.sim.tenant import ServingTenant
from libra.lend.traffic.envelope import Envelope
from libra.route.catalogue import policy_named
from libra.sim.clock import TICKS, seconds, ticks
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.workload.requests import RecordedRequest, recorded_requests

MS = ticks(0.001)
SERVING = EngineSpec(
    "serving",
    EngineConfig(1024, 4096, max_num_seqs=64, max_num_batched_tokens=128),
    AffineCost(step=5 * MS, per_sequence=MS // 4, per_context_token=MS // 1000, per_new_token=MS // 20),
)
ROLLOUT = EngineSpec(
    "lent",
    EngineConfig(1024, 96, max_num_seqs=8, max_num_batched_tokens=64),  # little memory: some are preempted
    AffineCost(step=6 * MS, per_sequence=MS // 10, per_context_token=MS // 500, per_new_token=MS // 20),
)
OWN = replace(ROLLOUT, name="own")
BORROWER = replace(ROLLOUT, config=replace(ROLLOUT.config, max_model_len=512, kv_blocks=96))
PACE, PROMPT = ticks(0.06), 500
RULES: list[Callable[[], SharingRule]] = [
    lambda: ServeFirst(30 * MS),
    lambda: Alternate(30 * MS),
    lambda: PositiveSlack(30 * MS, ticks(0.2)),
    lambda: Gate(30 * MS, MS),
    lambda: WatchedRule(
        Gate(30 * MS, MS), Envelope(4.0, 600, 5, 1500, 2.0), Recall(RecallPolicy(0.5, 4.0)), float(TICKS)
    ),
]


def traffic(most: int) -> st.SearchStrategy[list[RecordedRequest]]:
    record = st.builds(
        RecordedRequest, st.integers(0, 4000).map(lambda at: at * MS), st.integers(1, 500), st.integers(1, 40)
    )
    return st.lists(record, min_size=1, max_size=most).map(lambda found: sorted(found, key=lambda it: it.arrival))


def tenant(records: Sequence[RecordedRequest], small: bool = False) -> ServingTenant:
    spec = replace(SERVING, config=replace(SERVING.config, kv_blocks=160)) if small else SERVING
    return ServingTenant(spec, recorded_requests(records).start(), pace=PACE, prompt=PROMPT)


class Turns:
    """So many turns always under way, of lengths that follow from their numbers."""

    def __init__(self, under_way: int, most: int) -> None:
        self.under_way, self.most, self.made = under_way, most, 0
        self.ended: list[tuple[int, int | None, int]] = []
        self.turns: list[Request] = []

    def turn(self, number: int, now: int) -> Request:
        self.made = number + 1
        self.turns.append(Request(10**6 + number, now, 30 + 7 * (number % 13), 5 + number % 90))
        return self.turns[-1]

    def start(self) -> list[Request]:
        return [self.turn(number, 0) for number in range(self.under_way)]

    def finished(self, request: Request, now: int) -> Request | None:
        self.ended.append((request.number, request.first_token, now))
        return self.turn(self.made, now) if self.made < self.most else None

    def describe(self) -> dict[str, object]:
        return {}


def came_of(requests: Sequence[Request]) -> list[tuple[int | None, int | None]]:
    return [(it.first_token, it.finish) for it in requests]


@settings(max_examples=40, deadline=None)
@given(records=traffic(25), rule=st.sampled_from(RULES[:-1]), under_way=st.integers(1, 10))
def test_in_a_cluster_it_is_the_shared_device(records, rule, under_way) -> None:
    turns = Turns(under_way, 10**9)
    borrower = RolloutBorrower(ROLLOUT, under_way, turns.turn)
    shared = SharedDevice(SERVING, rule(), borrower, pace=PACE, prompt=PROMPT).run(recorded_requests(records).start())
    device = LenderDevice(tenant(records), rule(), 0.7)
    cluster = SimCluster([OWN], again := Turns(under_way, 10**9), policy_named("least-loaded"), time_limit=shared.end)
    cluster.close("own")
    cluster.at(0, lambda now: cluster.add(ROLLOUT, partial(GrantedEngine, device=device, recalled=pytest.fail)))
    cluster.frontend.patient = True
    cluster.run()
    assert came_of(device.serve_out(shared.end)) == came_of(shared.requests)
    found = {it.number: (it.first_token, it.finish) for it in again.turns}
    assert all(found[it.number] == (it.first_token, it.finish) for it in turns.turns if it.finish is not None)
    assert device.lent >= shared.lent


class Loaned:
    """A lender and an engine of one's own in a cluster, with updates and recalls."""

    def __init__(
        self,
        records,
        rule,
        under_way: int,
        most: int,
        updates: Sequence[WeightUpdate],
        exact: bool,
        kv: KVTerms | None = None,
        watched: bool = False,
    ) -> None:
        small = kv is not None
        self.device = LenderDevice(tenant(records, small=small), rule(), 0.7, exact=exact, watched=watched)
        if kv is not None:
            self.device.tenant.kv = KVLoan(kv, self.device.tenant.engine, BORROWER.config)
        self.turns = Turns(under_way, most)
        self.recalls: list[int] = []
        self.cluster = SimCluster([OWN], self.turns, policy_named("least-loaded"), updates=updates, exact=exact)
        self.cluster.at(0, self.lend)
        self.cluster.run()
        self.served = self.device.serve_out(self.cluster.now)

    def lend(self, now: int) -> None:
        spec = ROLLOUT if self.device.tenant.kv is None else BORROWER
        self.cluster.add(spec, partial(GrantedEngine, device=self.device, recalled=self.recalled))

    def recalled(self, now: int) -> None:
        self.recalls.append(now)
        self.cluster.at(now + 1, self.close)

    def close(self, now: int) -> None:
        self.cluster.close("lent")
        kv = self.device.tenant.kv
        if kv is not None and not kv.useful:
            kv.quota.trained()
            now = max(now, self.device.at) + ticks(kv.quota.limits.quiet)
        self.cluster.at(max(now, self.device.returns()), self.lend)


UPDATES = st.lists(
    st.builds(
        WeightUpdate,
        st.integers(1, 4000).map(lambda at: at * MS),
        st.integers(0, 300).map(lambda at: at * MS),
        st.booleans(),
    ),
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(
    records=traffic(40),
    rule=st.sampled_from(RULES),
    under_way=st.integers(1, 20),
    most=st.integers(20, 80),
    updates=UPDATES,
)
def test_runs_of_steps_are_the_steps(records, rule, under_way, most, updates) -> None:
    made, exact = (Loaned(records, rule, under_way, most, updates, exact) for exact in (False, True))
    assert made.turns.ended == exact.turns.ended
    assert len(made.turns.ended) == most
    assert made.recalls == exact.recalls
    assert came_of(made.served) == came_of(exact.served)
    assert made.device.tenant.margin == exact.device.tenant.margin
    assert made.device.tenant.uncovered == exact.device.tenant.uncovered
    assert made.device.lent == exact.device.lent and made.device.share == exact.device.share
    assert sum(it.iterations for it in made.cluster.engines) == sum(it.iterations for it in exact.cluster.engines)
    assert sum(it.events for it in made.cluster.engines) <= sum(it.events for it in exact.cluster.engines)


@settings(max_examples=60, deadline=None)
@given(
    records=traffic(40),
    rule=st.sampled_from(RULES),
    under_way=st.integers(1, 20),
    most=st.integers(20, 80),
    updates=UPDATES,
    beside=st.sampled_from([0, 40_000]),
)
def test_so_they_are_where_memory_changes_hands(records, rule, under_way, most, updates, beside) -> None:
    kv = KVTerms(serving=2000, rollout=1000, beside=beside, quiet=0.2)
    made, exact = (Loaned(records, rule, under_way, most, updates, exact, kv) for exact in (False, True))
    assert made.turns.ended == exact.turns.ended
    assert len(made.turns.ended) == most
    assert made.recalls == exact.recalls
    assert came_of(made.served) == came_of(exact.served)
    for name in ("lent", "share", "put_out"):
        assert getattr(made.device, name) == getattr(exact.device, name)
    one, other = made.device.tenant.kv, exact.device.tenant.kv
    assert one is not None and other is not None
    assert (one.own, one.ceded, one.both) == (other.own, other.ceded, other.both)


def test_memory_that_serving_needs_puts_turns_out_and_none_is_lost() -> None:
    bursts = [RecordedRequest(ticks(at) + number * MS, 400, 40) for at in (1.0, 3.0, 5.0) for number in range(4)]
    kv = KVTerms(serving=2000, rollout=1000, quiet=0.2)
    found = Loaned(bursts, RULES[3], 16, 600, (), False, kv)
    assert found.device.put_out and len(found.turns.ended) == 600
    assert found.device.tenant.engine.preemptions == 0
    assert all(request.finish is not None for request in found.served)


@settings(max_examples=20, deadline=None)
@given(records=traffic(40), rule=st.sampled_from(RULES), under_way=st.integers(1, 20), exact=st.booleans())
def test_who_watches_changes_nothing_and_sees_all(records, rule, under_way, exact) -> None:
    alone = Loaned(records, rule, under_way, 40, (), exact)
    seen = Loaned(records, rule, under_way, 40, (), exact, watched=True)
    assert came_of(seen.served) == came_of(alone.served) and seen.turns.ended == alone.turns.ended
    assert seen.device.watch is not None
    told = seen.device.watch.history("lent", Slo(1e-9, 1.0), 0.06, 0.03, seen.served, frozenset({0}))
    assert sum(it.end - it.start for it in told.grants) == pytest.approx(seconds(seen.device.lent))
    assert sum(it.end - it.start for it in told.serving) == pytest.approx(seconds(seen.device.tenant.computed))
    assert all(it.granted >= it.end - it.start - 1e-9 for it in told.grants)
    spans = sorted((it.start, it.end) for it in (*told.grants, *told.serving))
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
    margins = [it.margin for it in told.serving if it.margin is not None]
    assert min(margins, default=math.inf) == pytest.approx(seen.device.tenant.margin / TICKS)
    assert [it.came for it in told.requests] == [seconds(it.arrival) for it in seen.served]
    blamed = [it.request.number for it in told.missed() if it.blamed]  # none is quick enough
    assert blamed == [it.number for it in seen.served if it.number == 0]


def test_a_burst_recalls_and_the_loan_comes_back() -> None:
    burst = [RecordedRequest(ticks(1.0) + number * 10 * MS, 300, 30) for number in range(20)]
    records = [*burst, RecordedRequest(ticks(8.0), 10, 10)]
    found = Loaned(records, RULES[-1], 12, 1500, (), exact=False)
    assert len(found.recalls) == 1 and 1.0 < seconds(found.recalls[0]) < 2.0
    engines = [it for it, spec in zip(found.cluster.engines, found.cluster.specs, strict=True) if spec.name == "lent"]
    assert len(engines) == 2 and engines[0].closed
    assert found.device.recalls == 1
    assert [it.recall_rate(ticks(4.0)) for it in found.cluster.engines] == [0.0, 0.25, 0.25]
    assert all(it.iterations for it in engines)


def test_a_step_that_no_grant_holds_is_said() -> None:
    with pytest.raises(RuntimeError, match="longer than the longest grant"):
        Loaned([RecordedRequest(0, 10, 10)], lambda: Gate(MS, MS), 4, 8, (), exact=False)
