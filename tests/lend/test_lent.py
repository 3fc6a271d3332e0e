"""The planner counts on nothing that no certificate covers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_cluster import CLASSES, CLUSTER, QWEN_06B, QWEN_14B, RECIPE
from oracles.small_lender import CERTIFICATE, SERVING, lender
from tables import by_name

from libra.config.recipe import Recipe
from libra.cost.engine_memory import BLOCK
from libra.cost.sources.roofline import node_roofline
from libra.lend.certificate import Certificate, Harvest
from libra.lend.lender import Lender
from libra.lend.traffic.envelope import Envelope
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.engines import shape_options
from libra.plan.plan import make_plan
from libra.plan.planner import Planner

PLANNER = Planner(replace(CLUSTER, serving=(SERVING,)), QWEN_06B, RECIPE)


def request(made: Lender, **changes: Any) -> ClusterRequest:
    return replace(PLANNER, lenders=(made,), **changes).request(CLASSES)


@st.composite
def certificates(draw: st.DrawFn) -> tuple[Certificate, ...]:
    """Some, by rising use, each with a harvest that falls or rises with the rate."""
    made = []
    for use in sorted(draw(st.sets(st.sampled_from([0.4, 0.6, 0.8, 1.0]), min_size=1, max_size=3))):
        rates = sorted(draw(st.sets(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=1)))
        harvest = tuple(Harvest(rate, draw(st.sampled_from([0.0, 0.1, 0.5, 0.75, 0.9, 1.0]))) for rate in rates)
        envelope = Envelope(
            rate=draw(st.sampled_from([0.7, 3.0, 9.0])),
            queued=draw(st.integers(1, 20_000)),
            live=40,
            context=draw(st.sampled_from([1, 60_000, 300_000, 550_000])),
            window=60.0,
        )
        grant = draw(st.sampled_from([1e-4, 0.003, 0.01, 0.1]))
        made.append(replace(CERTIFICATE, use=use, harvest=harvest, envelope=envelope, longest_grant=grant))
    return tuple(made)


@settings(max_examples=25, deadline=None)
@given(certificates(), st.lists(st.sampled_from([0.0, 0.4, 0.9, 1.0, 1.5, 2.0, 3.9, 4.1, 8.0]), min_size=1, max_size=9))
def test_the_planner_counts_on_nothing_that_no_certificate_covers(
    proven: tuple[Certificate, ...], rates: list[float]
) -> None:
    made = lender(*rates, certificates=proven)
    asked = request(made)
    menu, plan = asked.menu(), make_plan(asked)
    problem, (profile,) = menu.problem, asked.lent_profiles
    by_shape = {f"chat/tp1@{it.use:g}": it for it in proven}
    assert problem.lent <= by_shape.keys()
    assert [it.shape for it in menu.lent] == list(dict.fromkeys(o.shape for o in problem.engines if o.pool == "chat"))
    assert not any(option.pool == "chat" for option in problem.training)
    for engine in menu.lent:
        certificate = by_shape[engine.shape]
        # As little as in the worst case of those in which anything is lent, at least; never more than in the best.
        lent = [share for rate in rates if (share := _certified(certificate, rate)) > 0]
        assert min(lent) - 1e-12 <= engine.share <= max(lent) + 1e-12
        # Both engines fit, with all that serving was seen to hold, and some step fits into a grant.
        reserve = (certificate.envelope.context + certificate.envelope.queued) * QWEN_06B.kv_bytes_per_token(2, 1, 1)
        rollout = engine.kv_tokens * QWEN_06B.kv_bytes_per_token(2, 1, 1)
        weights = 2 * 2 * QWEN_06B.device_parameters().total
        assert reserve + rollout + weights < SERVING.nodes.gpu.memory * RECIPE.gpu_memory_utilization
        assert profile.grid(1).prefill_seconds(BLOCK, engine.holds) <= certificate.longest_grant
        assert profile.grid(1).decode_seconds(1, engine.holds) <= certificate.longest_grant
        assert engine.holds < RECIPE.max_length
        # Nothing is faster than on a device of one's own by more than the share of it that is lent.
        alone = shape_options(
            SERVING.nodes, RECIPE, CLASSES, profile.grid(1), engine.shape, engine.kv_tokens, engine.holds, QWEN_06B
        )
        mine = [option for option in problem.engines if option.shape == engine.shape]
        for option, own in zip(mine, alone, strict=True):
            assert option.holds == own.holds == engine.holds
            assert option.stall * engine.share >= own.stall * (1 - 1e-9)
            for field in ("work", "generates"):
                for row, fastest in zip(getattr(option, field), getattr(own, field), strict=True):
                    assert all(a * engine.share >= b * (1 - 1e-9) for a, b in zip(row, fastest, strict=True))
    # What the plan borrows is what it says, no device twice, and always leaves an engine of one's own.
    borrowed = [group for group in plan.placement if group.pool == "chat"]
    assert sum(loan.engines for loan in plan.loans) == len(borrowed) <= SERVING.nodes.devices
    assert len({(group.nodes, group.gpus) for group in borrowed}) == len(borrowed)
    assert plan.allocation.buckets[-1].shape not in problem.lent
    for loan in plan.loans:
        certificate = by_shape[loan.shape]
        gone = [rate for rate in rates if _certified(certificate, rate) == 0]
        assert (loan.use, loan.away) == (certificate.use, pytest.approx(len(gone) / len(rates)))
    assert sum(it.probability for it in menu.availability) == pytest.approx(1.0)
    for engine in menu.lent:
        away = sum(it.probability for it in menu.availability if engine.shape in it.away)
        assert away == pytest.approx(engine.away)


def _certified(certificate: Certificate, rate: float) -> float:
    """Read off the certificate by hand."""
    covered = [row for row in certificate.harvest if row.rate >= rate]
    return covered[0].share if covered and rate <= certificate.envelope.rate else 0.0


def test_a_recall_costs_the_contexts_that_are_put_out() -> None:
    """Nothing but `work` grows, by the recalls a second times what is under way and its prefill."""
    calm, twice = (
        next(o for o in request(made).menu().problem.engines if o.pool == "chat")
        for made in (lender(1.0, 9.0, period=1e12), lender(1.0, 9.0, period=100.0))
    )
    thrice = next(o for o in request(lender(1.0, 9.0, period=50.0)).menu().problem.engines if o.pool == "chat")
    assert replace(twice, work=calm.work) == calm
    for a, b, c in zip(calm.work[0], twice.work[0], thrice.work[0], strict=True):
        assert c - a == pytest.approx(2 * (b - a), rel=1e-6)
        assert b > a


CROWDED = replace(CERTIFICATE, envelope=Envelope(6.0, 8000, 40, 700_000, 60.0))
BRIEF = replace(CERTIFICATE, longest_grant=1e-4)
REFUSED: list[tuple[str, Lender, Recipe, str, str]] = [
    ("too busy", lender(4.5), RECIPE, "lends nothing", "4.5 requests/s or more are expected at an engine, and lending"),
    ("no memory", lender(1.0, certificates=(CROWDED,)), RECIPE, "does not fit", "its certified KV and Qwen/Qwen3-0.6B"),
    ("short grants", lender(1.0, certificates=(BRIEF,)), RECIPE, "too slow", "a certified grant lasts 0.1 ms: certify"),
]  # fmt: skip


@by_name("made, recipe, kind, message", REFUSED)
def test_what_lends_nothing_says_why(made: Lender, recipe: Recipe, kind: str, message: str) -> None:
    menu = request(made, recipe=recipe).menu()
    assert not menu.lent and not menu.problem.lent
    rejected = next(it for it in menu.rejected if it.name == "chat/tp1@0.8")
    assert rejected.kind == kind
    assert message in rejected.reason
    assert make_plan(request(made, recipe=recipe)).loans == ()


def test_requests_name_a_pool_that_serves_and_times_of_it() -> None:
    with pytest.raises(ValueError, match="chat"):
        replace(request(lender(1.0)), cluster=CLUSTER)
    with pytest.raises(ValueError, match="there are 0 profiles for 1 lenders"):
        replace(request(lender(1.0)), lent_profiles=())
    with pytest.raises(ValueError, match="the profile for chat is of Qwen/Qwen3-14B"):
        replace(request(lender(1.0)), lent_profiles=(node_roofline(SERVING.nodes, QWEN_14B, RECIPE),))
