"""KV memory that changes hands on a simulated device: serving makes the steps that it makes without the loan."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from libra.lend.sim.kv_loan import KVLoan, KVTerms
from libra.lend.sim.tenant import ServingTenant
from libra.sim.clock import ticks
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.workload.requests import RecordedRequest, recorded_requests

MS = ticks(0.001)
COST = AffineCost(step=5 * MS, per_sequence=MS // 4, per_context_token=MS // 1000, per_new_token=MS // 20)
# Memory for four longest requests. Blocks that change hands are forgotten by a prefix cache, so there is none.
CONFIG = EngineConfig(512, 120, max_num_seqs=12, max_num_batched_tokens=128, enable_prefix_caching=False)
ROLLOUT = EngineConfig(256, 100, max_num_seqs=8, max_num_batched_tokens=64)
TERMS = KVTerms(serving=3000, rollout=2000, quiet=0.05)
TRAFFIC = st.lists(
    st.builds(RecordedRequest, st.integers(0, 2000).map(lambda at: at * MS), st.integers(1, 400), st.integers(1, 100)),
    min_size=1,
    max_size=30,
).map(lambda found: sorted(found, key=lambda it: it.arrival))


@settings(max_examples=80, deadline=None)
@given(records=TRAFFIC, looks=st.randoms(use_true_random=False), often=st.sampled_from([0.1, 0.5, 1.0]))
def test_each_step_of_serving_is_that_without_the_loan(records: list[RecordedRequest], looks, often: float) -> None:
    """Against an engine that really has no more blocks than serving has not ceded."""
    tenant = ServingTenant(EngineSpec("s", CONFIG, COST), recorded_requests(records).start(), pace=60 * MS, prompt=400)
    tenant.kv = loan = KVLoan(TERMS, tenant.engine, ROLLOUT)
    real = SimEngine(CONFIG, COST, exact=True)
    coming, steps, now = list(recorded_requests(records).start()), [], 0
    while tenant.next_arrival is not None or tenant.busy:
        tenant.arrive(now)
        while coming and coming[0].arrival <= now:
            real.submit(coming.pop(0), now)
        if looks.random() < often:
            if looks.random() < 0.1:
                loan.quota.trained()
            assert loan.look(now) * TERMS.rollout <= loan.ceded * TERMS.serving
        loan._cede()
        real.pool.resize(CONFIG.kv_blocks - loan.ceded)
        end = tenant.step(now)
        assert end == real.plan(now)
        if end is None:
            now = max(now, tenant.next_arrival or now)
            continue
        real.commit()
        assert loan.ceded <= tenant.engine.pool.free
        assert [it.number for it in tenant.engine.waiting] == [it.number for it in real.waiting]
        steps.append(end)
        now = end
    alone = SimEngine(CONFIG, COST, exact=True)
    again, made, now = list(recorded_requests(records).start()), [], 0
    while again or alone.unfinished:
        while again and again[0].arrival <= now:
            alone.submit(again.pop(0), now)
        end = alone.plan(now)
        if end is None:
            now = max(now, again[0].arrival)
            continue
        alone.commit()
        made.append(end)
        now = end
    assert steps == made and tenant.engine.preemptions == real.preemptions == alone.preemptions


def test_a_burst_takes_memory_back_and_it_comes_again_after_a_step_and_a_quiet_time() -> None:
    burst = [RecordedRequest(ticks(1.0), 300, 60) for _ in range(5)]
    tenant = ServingTenant(EngineSpec("s", CONFIG, COST), recorded_requests(burst).start(), pace=60 * MS, prompt=400)
    tenant.kv = loan = KVLoan(TERMS, tenant.engine, ROLLOUT)
    most = loan.look(0)
    assert loan.useful and most * TERMS.rollout <= (CONFIG.kv_blocks - 32 - 12) * TERMS.serving
    now = ticks(1.0)
    tenant.arrive(now)
    fewer = loan.look(now)
    assert fewer < most // 2 + 1 and not loan.useful
    while tenant.busy:
        now = tenant.step(now) or now
    loan.look(now + ticks(10.0))
    assert loan.own == fewer
    loan.quota.trained()
    loan.look(now + ticks(20.0))
    assert loan.own == most


def test_what_serving_takes_beyond_the_reserve_it_has_at_once() -> None:
    """All its sequences come at once while rollout computes, and does not look."""
    flood = [RecordedRequest(ticks(1.0), 100, 60) for _ in range(12)]
    tenant = ServingTenant(EngineSpec("s", CONFIG, COST), recorded_requests(flood).start(), pace=60 * MS, prompt=400)
    tenant.kv = loan = KVLoan(TERMS, tenant.engine, ROLLOUT)
    loan.look(0)
    now = ticks(1.0)
    tenant.arrive(now)
    while tenant.busy:
        now = tenant.step(now) or now
    assert loan.both > 0 and tenant.engine.preemptions == 0
    loan.look(now)
    assert loan.own * TERMS.rollout <= loan.ceded * TERMS.serving
