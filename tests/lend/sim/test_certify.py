from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libra.lend.gate import ServingView, Slo
from libra.lend.sim.certify import LendingCase, LoadTrial, NothingToLendError, certify
from libra.lend.sim.tenant import EngineServingCost, misses
from libra.sim.clock import seconds, ticks
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.workload.requests import RecordedRequest

MS = ticks(0.001)
COST = AffineCost(step=5 * MS, per_sequence=MS // 50, per_context_token=MS // 40_000, per_new_token=MS // 30)


def case(slo: Slo, chunk: int = 1024) -> LendingCase:
    rng = np.random.default_rng(5)
    at = np.cumsum(rng.exponential(0.4, 300))
    lengths = rng.integers(50, 1500, 300), rng.integers(1, 200, 300)
    records = [RecordedRequest(ticks(t), int(p), int(o)) for t, p, o in zip(at, *lengths, strict=True)]
    spec = EngineSpec("chat", EngineConfig(2048, 4096, max_num_seqs=128, max_num_batched_tokens=chunk), COST)
    return LendingCase(spec, "a-model", "1 x A100", slo, "made", tuple(records), 0.02)


def test_the_certificate_is_of_the_largest_load_without_an_attributable_miss() -> None:
    asked, told = case(Slo(0.25, 0.1)), []
    (found,) = certify(asked, [0.8], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], told.append)
    held = [trial for trial in told if trial.refused is None]
    assert 1 <= len(held) < len(told) and told[-1].refused is not None
    assert [row.rate for row in found.harvest] == [trial.rate for trial in held]
    shares = [row.share for row in found.harvest]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.5
    alone = misses(asked.alone(held[-1].load), 0.25, 0.1).any
    again = asked.lent(held[-1].load, 0.8)
    assert misses(again.requests, 0.25, 0.1).any <= alone
    assert (found.envelope.live, found.envelope.queued, found.envelope.context) == (
        again.most_live,
        again.most_queued,
        again.most_context,
    )
    assert found.longest_step <= found.slo.pace(0.8)
    assert again.longest_step <= ticks(found.longest_step)


def test_steps_longer_than_the_pace_are_refused_with_the_budget_that_would_do() -> None:
    slo = Slo(1.0, 0.03)
    told: list[LoadTrial] = []
    with pytest.raises(NothingToLendError, match="lower max_num_batched_tokens to 512"):
        certify(case(slo), [0.9], [1.0], told.append)
    certify(case(slo, chunk=512), [0.9], [1.0])
    view = ServingView(told[0].outcome.most_live, 0, 0, context=told[0].outcome.most_context)
    for budget, fits in ((1024, False), (512, True)):
        longest = EngineServingCost(COST, budget, case(slo).prompt).longest_step(view)
        assert (seconds(longest) <= slo.pace(0.9)) is fits


def test_an_slo_that_serving_alone_misses_is_refused() -> None:
    """As bad input, with what it keeps: lending has no part in that. At a higher load it is where lending ends."""
    with pytest.raises(ValueError, match=r"alone misses ttft of 0.01 s for \d+ of 300 .*: raise ttft$") as refused:
        certify(case(Slo(0.01, 0.1)), [0.8], [1.0, 2.0])
    assert not isinstance(refused.value, NothingToLendError)
    with pytest.raises(NothingToLendError, match="no max_num_batched_tokens makes it short enough"):
        certify(case(Slo(1.0, 0.02)), [0.26], [0.1])


def test_what_was_cancelled_is_served_to_its_end() -> None:
    asked = case(Slo(0.25, 0.1))
    cancelled = replace(asked, requests=tuple(replace(it, cancel_at=it.arrival) for it in asked.requests))
    assert [it.finish for it in cancelled.alone(1.0)] == [it.finish for it in asked.alone(1.0)]


@pytest.mark.parametrize(("uses", "loads"), [([], [1.0]), ([0.8], []), ([0.8], [0.0, 1.0])])
def test_what_is_bad_input(uses: list[float], loads: list[float]) -> None:
    with pytest.raises(ValueError, match="uses and loads: give at least one of each"):
        certify(case(Slo(0.25, 0.1)), uses, loads)
