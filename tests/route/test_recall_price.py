"""What it costs to place a turn on an instance that is lent, against sums token by token; and that nothing lent is as
if nobody could lend."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.route.cmlfq import CMLFQ, PLACED
from libra.route.policy import InstanceView, TurnRequest, View
from libra.route.remaining import BINS, EDGES, Remaining, bin_of
from libra.route.service_cost import MigrationCost, offers_of, service_cost
from libra.trajectory import Trajectory, Turn

SHORT, LONG = 2_000, 40_000

weights = st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any)


def remaining_of(shares: list[int]) -> Remaining:
    found = np.zeros(BINS, np.float32)
    found[: len(shares)] = shares
    return Remaining(found)


@given(
    weights,
    st.floats(1e-9, 1.0),
    st.integers(0, 2_000),
    st.sampled_from([0.0, 1.0, 40.0, 700.0, math.inf]),
)
def test_a_recall_before_the_end(shares: list[int], rate: float, past: int, most: float) -> None:
    """The oracle: a recall comes in the middle of each of many short stretches, as likely as by then none has come and
    more remains."""
    remaining = remaining_of(shares).after(past)
    longest = max(EDGES[len(shares)] - past, EDGES[bin_of(past) + 1])
    steps = np.linspace(0.0, min(most, 40 / rate, longest), 4_001)
    middle = (steps[1:] + steps[:-1]) / 2
    come = -np.diff(np.exp(-rate * steps)) * [remaining.beyond(it) for it in middle]
    probability, passed = remaining.interrupted(rate, most)
    assert probability == pytest.approx(come.sum(), rel=0.01, abs=1e-9)
    assert 0 <= probability <= 1 and 0 <= passed <= min(most, EDGES[-1])
    if probability > 1e-6:
        assert passed == pytest.approx((come * middle).sum() / come.sum(), rel=0.02, abs=0.02)


def test_a_recall_that_cannot_come_in_time() -> None:
    remaining = remaining_of([1, 1])
    assert remaining.interrupted(0.1, 0.0) == (0.0, 0.0)
    assert remaining.interrupted(0.1, -5.0) == (0.0, 0.0)
    assert remaining.interrupted(1e9)[0] == pytest.approx(1.0)


def instance(id: str, bucket: int, load: int, recalls: float = 0.0) -> InstanceView:
    return InstanceView(id, bucket, (SHORT, LONG)[bucket], load, None, recalls)


def view(*instances: InstanceView) -> View:
    return View(instances, (SHORT, LONG), turn_tokens=100)


def test_the_price_of_a_recall_is_its_probability_times_that_of_the_move() -> None:
    migration, remaining = MigrationCost(2.0, 1e-3), remaining_of([0] * 20 + [1])
    own, lent = (offers_of(view(instance("a", 1, 900, recalls)), 0, None, 1.0)[0][0] for recalls in (0.0, 0.05))
    seconds = 0.02 * (1 + 900 / 900) / 2
    probability, passed = remaining.interrupted(0.05 * seconds)
    more = service_cost(remaining, 700, lent, migration) - service_cost(remaining, 700, own, migration)
    assert more == pytest.approx(probability * (2.0 + 1e-3 * (700 + passed)) * (1 + 900 / (700 + passed)))
    assert 0.2 < probability < 0.9 and passed < remaining.mean


def test_what_a_turn_waits_for_its_prompt_is_shared_by_its_tokens() -> None:
    fast = replace(instance("a", 1, 900), prompt_wait_seconds=3.0)
    for turn_tokens, more in ((150.0, 0.02), (30.0, 0.1), (0.0, 0.0)):
        offer = offers_of(view(fast), 0, None, turn_tokens)[0][0]
        assert offer.token_seconds == pytest.approx(0.02 + more)
        assert offer.told_seconds == 0.02
    with pytest.raises(ValueError, match="instance 'a': prompt_wait_seconds is"):
        replace(fast, prompt_wait_seconds=-1.0)


def test_instances_that_are_lent_make_offers_of_their_own() -> None:
    now = view(
        instance("a", 0, 50),
        instance("lent a", 0, 40, 0.1),
        instance("lent b", 0, 30, 0.2),
        instance("c", 1, 70),
        instance("lent c", 1, 5, 0.1),
    )
    offers, home = offers_of(now, 0, "lent a", 1.0)
    assert [it.instance.id for it in offers] == ["c", "lent c", "a", "lent b"]
    assert home is not None and home.instance.id == "lent a"
    assert [it.onward is None for it in offers] == [True, True, False, False]
    assert all(it.onward is offers[1] for it in (*offers[2:], home))


@pytest.mark.parametrize(
    ("recalls", "seconds_per_token", "wanted"),
    [
        pytest.param(0.0, 1e-2, "lent", id="it is less loaded"),
        pytest.param(1e-4, 1e-2, "lent", id="and will hardly be recalled"),
        pytest.param(0.1, 1e-2, "own", id="a recall is likely and dear"),
        pytest.param(0.1, 1e-6, "lent", id="a recall is likely and cheap"),
    ],
)
def test_where_the_first_turn_goes(recalls: float, seconds_per_token: float, wanted: str) -> None:
    policy = CMLFQ(MigrationCost(0.0, seconds_per_token))
    for number in range(10):
        turns = (Turn(100, "search", "ok", 5), Turn(600, None, None, 0))
        policy.finished(Trajectory(str(number), "p", "", 1_000, turns, None, 0, True))
    now = view(instance("own", 0, 12_000), instance("lent", 0, 10_000, recalls))
    placement = policy.place(TurnRequest("t", "p", 1_000, 1_000), now)
    assert placement is not None and (placement.instance, placement.reason) == (wanted, PLACED)


@given(weights, st.integers(0, 3_000), st.floats(0.0, 1.0), st.lists(st.integers(0, 9_000), min_size=2, max_size=6))
def test_a_likelier_recall_never_makes_an_instance_cheaper(
    shares: list[int], context: int, share: float, loads: list[int]
) -> None:
    remaining, migration = remaining_of(shares), MigrationCost(0.1, 1e-4)
    costs = []
    for recalls in (0.0, 1e-6, 1e-3, 0.1, 10.0):
        lent = [replace(instance(str(number), 1, load), recall_rate=recalls) for number, load in enumerate(loads)]
        offer = offers_of(view(*lent), 0, None, 1.0)[0][0]
        costs.append(service_cost(remaining, context, offer, migration, share))
    assert all(less <= more * (1 + 1e-6) + 1e-9 for less, more in pairwise(costs))


def test_a_rate_of_recalls_is_finite() -> None:
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="instance 'a': recall_rate is"):
            instance("a", 0, 0, wrong)
