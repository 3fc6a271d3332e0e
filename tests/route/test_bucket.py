"""Buckets: what belongs where, who serves it, and what every rule that expects a final context keeps to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.routing_quality import static_fleet
from sessions import LIMITS, OK, Step, decisions, instances, steps

from libra.route.bucket import AttainedService, Bucketed, bucket_of, server
from libra.route.expected_length import LengthByPrompt, LengthPredictor
from libra.route.policy import InstanceView, Placement, TurnRequest, View

RULES: list[type[Bucketed]] = [LengthByPrompt, LengthPredictor, AttainedService]
every_rule = pytest.mark.parametrize("rule", RULES, ids=[rule.NAME for rule in RULES])

A0 = InstanceView("a0", bucket=0, capacity_tokens=110, load_tokens=50)
B0 = InstanceView("b0", bucket=0, capacity_tokens=110, load_tokens=20)
C1 = InstanceView("c1", bucket=1, capacity_tokens=1_010, load_tokens=90)
D1 = InstanceView("d1", bucket=1, capacity_tokens=1_010, load_tokens=70)
E2 = InstanceView("e2", bucket=2, capacity_tokens=9_010, load_tokens=10)
EVERY = (A0, B0, C1, D1, E2)


def view(*there: InstanceView) -> View:
    return View(there, LIMITS, 10)


@pytest.mark.parametrize(
    ("final_context", "wanted"),
    [(0, 0), (99.5, 0), (100, 0), (100.5, 1), (101, 1), (1_000, 1), (1_001, 2), (9_000, 2), (9_001, 2), (10**20, 2)],
)
def test_bucket_of(final_context: float, wanted: int) -> None:
    assert bucket_of(final_context, LIMITS) == wanted


@given(st.integers(0, 50), st.lists(st.integers(1, 40), min_size=1, unique=True).map(sorted))
def test_a_bucket_is_the_shortest_that_holds_it(final_context: int, limits: Sequence[int]) -> None:
    holding = [bucket for bucket, limit in enumerate(limits) if final_context <= limit]
    assert bucket_of(final_context, limits) == (holding[0] if holding else len(limits) - 1)


@given(
    st.lists(instances, max_size=6, unique_by=lambda instance: instance.id),
    st.sampled_from([50, 90, 950, 9_001]),
    st.integers(0, 2),
    st.none() | st.sampled_from("abcdefg"),
)
def test_the_server_is_in_the_wanted_bucket_or_the_next_longer_or_the_nearest_shorter(
    there: list[InstanceView], needed: int, wanted: int, prefix_at: str | None
) -> None:
    for bucket in [*range(wanted, 3), *range(wanted - 1, -1, -1)]:
        fit = [it for it in there if it.bucket == bucket and needed <= it.capacity_tokens]
        holder = [it for it in fit if it.id == prefix_at]
        if fit:
            expected = holder[0] if holder else min(fit, key=lambda it: (it.load_tokens, it.id))
            assert server(there, needed, wanted, prefix_at) == expected
            return
    assert server(there, needed, wanted, prefix_at) is None


def test_the_server_may_be_chosen_by_another_load() -> None:
    work = {"a0": 1.0, "b0": 2.0}
    assert server([A0, B0], 10, 0, None, lambda instance: work[instance.id]) == A0


# What the rules share.


@every_rule
def test_before_any_trajectory_has_finished_the_prompt_is_all_that_is_expected(rule: type[Bucketed]) -> None:
    for context, wanted in [(10, "b0"), (101, "d1"), (1_001, "e2")]:
        placement = rule().place(TurnRequest("t", "p", context, context), view(*EVERY))
        assert placement is not None
        assert (placement.instance, placement.reason, placement.migrated) == (wanted, rule.REASON, False)


@every_rule
def test_a_bucket_is_kept_until_it_is_outgrown(rule: type[Bucketed]) -> None:
    policy, fleet = rule(), view(*EVERY)
    policy.place(TurnRequest("t", "p", 10, 10), view(A0))
    stays = policy.tool_returned(TurnRequest("t", "p", 10, 100), OK, fleet)
    assert stays == Placement("a0", 0, False, "holds the prefix", ask_again=1)
    moved = policy.tool_returned(TurnRequest("t", "p", 10, 101), OK, fleet)
    assert moved == Placement("d1", 1, True, rule.REASON, ask_again=900)
    # A context that was compacted had outgrown the shorter bucket, and may again.
    assert policy.tool_returned(TurnRequest("t", "p", 10, 20), OK, fleet) == Placement(
        "d1", 1, False, "holds the prefix", ask_again=981
    )


@every_rule
def test_a_turn_that_outlives_its_bucket_goes_on_in_a_longer_one(rule: type[Bucketed]) -> None:
    policy, fleet, request = rule(), view(*EVERY), TurnRequest("t", "p", 10, 10)
    assert policy.place(request, fleet) == Placement("b0", 0, False, rule.REASON, ask_again=91)
    early = policy.bucket_overrun(request, 90, fleet)
    assert early == Placement("b0", 0, False, "holds the prefix", ask_again=91)
    assert policy.bucket_overrun(request, 91, fleet) == Placement("d1", 1, True, rule.REASON, ask_again=991)
    assert policy.bucket_overrun(request, 991, fleet) == Placement("e2", 2, True, rule.REASON, ask_again=None)
    back = policy.tool_returned(TurnRequest("t", "p", 10, 1_020), OK, fleet)
    assert back == Placement("e2", 2, False, "holds the prefix")


@every_rule
def test_a_turn_that_nothing_longer_can_take_stays(rule: type[Bucketed]) -> None:
    policy, request = rule(), TurnRequest("t", "p", 10, 10)
    policy.place(request, view(A0))
    there = policy.bucket_overrun(request, 91, view(A0, B0))
    assert there == Placement("a0", 0, False, "holds the prefix; no instance of bucket 1 holds the turn", ask_again=991)
    assert policy.bucket_overrun(request, 991, view(A0, B0)) is None  # neither holds as much


@every_rule
@pytest.mark.parametrize("sticky", [True, False])
def test_a_turn_under_way_is_not_moved_for_load_alone(rule: type[Bucketed], sticky: bool) -> None:
    policy, request = rule(sticky=sticky), TurnRequest("t", "p", 10, 10)
    policy.place(request, view(A0))
    staying = policy.bucket_overrun(request, 50, view(A0, B0))
    assert staying is not None and staying.instance == "a0"
    next_turn = policy.tool_returned(request, OK, view(A0, B0))
    assert next_turn is not None and next_turn.instance == ("a0" if sticky else "b0")


@every_rule
def test_a_trajectory_that_found_no_room_is_placed_when_there_is_some(rule: type[Bucketed]) -> None:
    policy, request = rule(), TurnRequest("t", "p", 10, 10)
    assert policy.place(request, view()) is None
    placement = policy.tool_returned(request, OK, view(C1))
    assert placement is not None
    assert placement.instance == "c1" and not placement.migrated
    assert placement.reason == f"{rule.REASON}; no instance of bucket 0 holds the turn"


# Every decision, over random sessions.


@every_rule
@given(session=st.lists(steps, max_size=25), sticky=st.booleans())
def test_every_decision_is_in_a_long_enough_bucket_and_asks_again_in_time(
    rule: type[Bucketed], session: list[Step], sticky: bool
) -> None:
    for it in decisions(rule(sticky=sticky), session):
        # As long as a long enough bucket has an instance that can take it, a trajectory is in one.
        belongs = bucket_of(it.attained, LIMITS)
        if any(each.bucket >= belongs for each in it.fit.values()):
            assert it.placement.bucket >= belongs
        if it.placement.ask_again is not None:
            assert it.placement.ask_again > it.generated
            limit = it.request.context_tokens + it.placement.ask_again - 1
            assert limit in LIMITS[:-1] and it.request.context_tokens + it.generated <= limit


# Attained service.

ATTAINED = (10, 25, 60)


@given(st.integers(0, 15), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=4))
def test_attained_service_is_always_where_the_attained_context_belongs(
    prompt: int, turns: list[tuple[int, int]]
) -> None:
    # Token by token, asking when the policy wants to be asked, and never else.
    policy, context = AttainedService(), prompt
    fleet = static_fleet(ATTAINED, turn_tokens=0, instances=2)
    for number, (generated, returned) in enumerate(turns):
        request = TurnRequest("t", "p", prompt, context)
        if context >= ATTAINED[-1]:
            return
        placement = policy.tool_returned(request, OK, fleet) if number else policy.place(request, fleet)
        assert placement is not None
        bucket, ask_again = placement.bucket, placement.ask_again
        assert bucket == bucket_of(context, ATTAINED)
        for token in range(1, generated + 1):
            if context + token >= ATTAINED[-1]:
                return
            if token == ask_again:
                moved = policy.bucket_overrun(request, token, fleet)
                assert moved is not None and moved.migrated
                bucket, ask_again = moved.bucket, moved.ask_again
            assert bucket == bucket_of(context + token, ATTAINED)
        context += generated + returned
