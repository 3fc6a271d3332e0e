"""C-MLFQ by expected cost: a table of first turns and moves, and properties of every decision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import OK, finished, requests, tool_returns, views

from libra.route.cmlfq import BLIND, BLIND_STAYS, CMLFQ, MOVES, OUTGROWN, PLACED, STAYS
from libra.route.policy import InstanceView, Placement, ToolReturn, TurnRequest, View
from libra.route.service_cost import TOKEN_SECONDS, MigrationCost
from libra.route.tool_state import ToolState, payload_class
from libra.trajectory import Trajectory, Turn

FAIL = ToolReturn("search", "error", 5)
SHORT, LONG = 2_000, 40_000


def done(after: int, by: ToolReturn = OK, *, prompt_id: str = "p", times: int = 10) -> list[Trajectory]:
    """Finished trajectories with one tool return and so many generated tokens after it, in turns of 100 or more."""
    return [
        Trajectory(
            id=f"{prompt_id} {by.status} {after} {number}",
            prompt_id=prompt_id,
            task="",
            prompt_tokens=1_000,
            turns=(Turn(100, by.tool, by.status, by.returned_tokens), Turn(after, None, None, 0)),
            reward=None,
            policy_version=0,
            finished=True,
        )
        for number in range(times)
    ]


def taught(*history: list[Trajectory], migration: MigrationCost | None = None) -> CMLFQ:
    policy = CMLFQ(migration)
    for trajectories in history:
        for trajectory in trajectories:
            policy.finished(trajectory)
    return policy


def view(*instances: InstanceView, limits: tuple[int, ...] = (SHORT, LONG)) -> View:
    return View(instances, limits, turn_tokens=100)


def short(id: str, load: int = 10_000, seconds: float | None = 0.02) -> InstanceView:
    return InstanceView(id, 0, SHORT, load, seconds)


def long(id: str, load: int = 10_000, seconds: float | None = 0.02) -> InstanceView:
    return InstanceView(id, 1, LONG, load, seconds)


def first(policy: CMLFQ, now: View, *, context: int = 1_000, prompt_id: str = "p") -> Placement:
    placement = policy.place(TurnRequest("t", prompt_id, context, context), now)
    assert placement is not None
    return placement


def then(policy: CMLFQ, now: View, returned: ToolReturn = OK, *, context: int = 1_105) -> Placement:
    placement = policy.tool_returned(TurnRequest("t", "p", 1_000, context), returned, now)
    assert placement is not None
    return placement


# Where the first turn goes.


@pytest.mark.parametrize(
    ("history", "instances", "wanted"),
    [
        ([], (short("a", 30), short("b", 20), long("c", 10)), ("c", BLIND)),
        ([], (short("b", 20), short("a", 20)), ("a", BLIND)),
        (done(200), (short("a"), long("c", 12_000)), ("a", PLACED)),
        (done(200), (short("a"), short("b", 9_000), long("c", 12_000)), ("b", PLACED)),
        (done(20_000), (short("a"), long("c")), ("c", PLACED)),
        # An idle bucket gets what belongs in a shorter one that is busy, and a fast one what a slow one would serve.
        (done(200), (short("a", 500_000, None), long("c", 0, None)), ("c", PLACED)),
        (done(200), (short("a", 0, 0.05), long("c", 500_000, 0.02)), ("c", PLACED)),
        (done(200), (short("a", 50_000, 0.1), long("c", 50_000, 0.01)), ("c", PLACED)),
    ],
)
def test_the_first_turn(
    history: list[Trajectory], instances: tuple[InstanceView, ...], wanted: tuple[str, str]
) -> None:
    placement = first(taught(history), view(*instances))
    assert (placement.instance, placement.reason) == wanted
    assert not placement.migrated


def test_the_first_turn_goes_by_the_prompts_own_samples() -> None:
    history = done(200, prompt_id="easy", times=50), done(20_000, prompt_id="hard", times=50)
    policy = taught(*history, migration=MigrationCost(1.0, 1e-4))
    now = view(short("a"), long("c", 12_000))
    assert first(policy, now, prompt_id="easy").bucket == 0
    policy.forget("t")
    assert first(policy, now, prompt_id="hard").bucket == 1


# Moves.


def test_a_return_that_announces_a_long_rest_moves_where_moving_later_costs_more() -> None:
    policy = taught(done(300, OK, times=40), done(20_000, FAIL, times=40), migration=MigrationCost(0.01, 1e-3))
    now = view(short("a", 0), long("c", 0, 0.021))
    policy.place(TurnRequest("t", "p", 1_000, 1_000), view(short("a", 0)))
    stays = then(policy, now, OK)
    assert (stays.instance, stays.reason) == ("a", STAYS)
    moves = then(policy, now, FAIL, context=1_210)
    assert (moves.instance, moves.reason, moves.migrated) == ("c", MOVES, True)


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    policy = taught(done(300), migration=MigrationCost(1e6, 0))
    policy.place(TurnRequest("t", "p", 1_000, 1_000), view(short("a", 100_000)))
    placement = then(policy, view(short("a", 100_000), short("b", 0), long("c", 0)))
    assert (placement.instance, placement.reason) == ("a", STAYS)


@pytest.mark.parametrize(("busy", "idle"), [(short, short), (long, long), (short, long), (long, short)])
def test_an_idle_instance_is_worth_a_cheap_move(
    busy: Callable[..., InstanceView], idle: Callable[..., InstanceView]
) -> None:
    policy = taught(done(300), migration=MigrationCost(0, 1e-6))
    policy.place(TurnRequest("t", "p", 1_000, 1_000), view(busy("a", 100_000, None)))
    placement = then(policy, view(busy("a", 100_000, None), idle("b", 0, None)))
    assert (placement.instance, placement.reason, placement.migrated) == ("b", MOVES, True)


def test_a_bucket_that_is_too_dear_does_not_hide_another_one() -> None:
    policy = taught(done(300), migration=MigrationCost(0, 1e-6))
    limits = (SHORT, 10_000, LONG)
    home, dear = InstanceView("c", 2, LONG, 100_000), InstanceView("b", 1, 10_000, 10**7)
    policy.place(TurnRequest("t", "p", 1_000, 1_000), view(home, limits=limits))
    placement = then(policy, view(home, dear, short("a", 0, None), limits=limits))
    assert (placement.instance, placement.reason) == ("a", MOVES)


def test_of_unequal_instances_in_one_bucket_a_fast_one_with_more_work_is_weighed_too() -> None:
    slow, fast = long("slow", 10, 0.02), long("fast", 9_000, 0.01)
    policy = taught(done(500))
    assert first(policy, view(slow, fast)).instance == "slow"  # they count as equally fast
    policy = taught(done(500))
    assert first(policy, view(replace(slow, pace_class=1), fast)).instance == "fast"


def test_without_evidence_a_turn_follows_its_prefix() -> None:
    policy = CMLFQ()
    policy.place(TurnRequest("t", "p", 1_000, 1_000), view(short("a", 100)))
    placement = then(policy, view(short("a", 100), short("b", 0)))
    assert (placement.instance, placement.reason) == ("a", BLIND_STAYS)


@pytest.mark.parametrize(("last", "wanted"), [(0.03, ("a", STAYS)), (0.02, ("a", STAYS)), (0.01, ("c", MOVES))])
def test_a_context_beyond_the_bucket_leaves_it_only_to_be_served_sooner(last: float, wanted: tuple[str, str]) -> None:
    policy = taught(done(3_000), migration=MigrationCost(0.01, 1e-6))
    roomy = InstanceView("a", 0, LONG, 1_000, 0.02)
    policy.place(TurnRequest("t", "p", 1_000, 1_000), view(roomy))
    placement = then(policy, view(roomy, long("c", 1_000, last)), context=SHORT + 1)
    assert (placement.instance, placement.reason) == wanted


def test_a_move_counts_on_a_turn_as_long_as_the_trajectorys_own() -> None:
    turns = (*(Turn(200, OK.tool, OK.status, 5) for _ in range(20)), Turn(200, None, None, 0))
    history = [Trajectory(str(number), "p", "", 1_000, turns, None, 0, True) for number in range(20)]
    policy = taught(history, migration=MigrationCost(5.0, 0))
    now = view(long("a", 10, 0.02), long("c", 0, 0.01))
    policy.place(TurnRequest("t", "p", 1_000, 1_000), view(long("a", 0, 0.02)))
    # Its turns have 1,200 tokens, others 200: 400 are expected after the first and 533 after the second, at a saving of
    # 10 ms each.
    placements = [
        then(policy, now, ToolReturn(OK.tool, OK.status, 5), context=1_000 + 1_205 * turn) for turn in (1, 2, 3)
    ]
    assert [it.instance for it in placements] == ["a", "c", "c"]


def test_an_instance_that_is_gone_is_left_and_has_lost_the_prefix() -> None:
    policy = taught(done(300))
    request = TurnRequest("t", "p", 1_000, 1_000)
    policy.place(request, view(short("a", 0)))
    policy.instance_gone("a")
    elsewhere = policy.place(request, view(short("b", 50)))
    assert elsewhere is not None and elsewhere.instance == "b" and elsewhere.migrated
    policy.instance_gone("b")
    back = policy.place(request, view(short("b", 50), short("c", 0)))
    assert back is not None and (back.instance, back.reason) == ("c", PLACED)


def test_nothing_that_can_hold_it_is_no_placement_and_the_return_is_not_forgotten() -> None:
    policy = taught(done(300, OK), done(20_000, FAIL))
    policy.place(TurnRequest("t", "p", 1_000, 1_000), view(short("a")))
    request = TurnRequest("t", "p", 1_000, 1_105)
    assert policy.tool_returned(request, FAIL, view()) is None
    assert policy.snapshot()["live"][0][4] == 1
    assert policy.place(request, view(short("a"), long("c"))) is not None


# Long generations.


def test_a_turn_is_asked_again_before_it_outgrows_its_instance_and_then_moves() -> None:
    policy = taught(done(SHORT, times=5))
    now = view(short("a", 0), long("c", 10**7, 0.05))
    placement = first(policy, now)
    assert placement.instance == "a"
    assert placement.ask_again == SHORT - 1_000 - 1
    request = TurnRequest("t", "p", 1_000, 1_000)
    moved = policy.bucket_overrun(request, placement.ask_again, now)
    assert moved is not None and (moved.instance, moved.reason, moved.ask_again) == ("c", OUTGROWN, None)
    assert policy.bucket_overrun(request, placement.ask_again + 1_000, now) is None


def test_a_turn_that_outlives_what_was_expected_is_asked_ever_more_rarely() -> None:
    policy = taught(done(50), migration=MigrationCost(1e6, 0))
    limits = (1_000_000, 2_000_000)
    now = View((InstanceView("a", 0, 10**6, 0, 0.02), InstanceView("b", 1, 2 * 10**6, 0, 0.02)), limits, 100)
    placement: Placement | None = first(policy, now)
    asked = []
    while placement is not None and placement.instance == "a" and placement.ask_again is not None:
        asked.append(placement.ask_again)
        placement = policy.bucket_overrun(TurnRequest("t", "p", 1_000, 1_000), asked[-1], now)
    assert asked[0] < 1_000 and asked[-1] == 1_000_000 - 1_000 - 1
    assert all(later >= 2 * sooner for sooner, later in pairwise(asked[:-1]))
    assert placement is not None and placement.instance == "b"


# Order.


def test_priority_is_slack_in_milliseconds() -> None:
    now = view(short("a", 100, None), limits=(SHORT,))
    assert first(CMLFQ(), now).priority == 0
    policy = taught(done(300, times=200))
    remaining = policy._hierarchy.predict(TurnRequest("t", "p", 1_000, 1_000), ())
    assert remaining is not None
    undue = policy.place(TurnRequest("t", "p", 1_000, 1_000), now)
    due = policy.place(TurnRequest("u", "p", 1_000, 1_000, due=1_000.0), now)
    assert undue is not None and due is not None
    assert undue.priority == round(-1_000 * remaining.mean * TOKEN_SECONDS)
    assert due.priority == undue.priority + 1_000_000


def test_where_all_are_due_at_once_the_longest_remaining_is_first() -> None:
    policy = taught(done(300, prompt_id="easy", times=20), done(30_000, prompt_id="hard", times=20))
    now = view(long("a"), limits=(SHORT, LONG))
    easy, hard = first(policy, now, prompt_id="easy"), policy.place(TurnRequest("u", "hard", 1_000, 1_000), now)
    assert hard is not None and hard.priority < easy.priority


@pytest.mark.parametrize(("fixed", "per_token"), [(-1.0, 0.0), (0.0, -1.0), (math.inf, 0.0), (0.0, math.nan)])
def test_a_move_costs_seconds(fixed: float, per_token: float) -> None:
    with pytest.raises(ValueError, match="give seconds, 0 or more"):
        MigrationCost(fixed, per_token)


def test_a_move_holds_up_what_is_there() -> None:
    cost = MigrationCost(1.0, 0.5)
    assert cost.seconds(10, 0) == 6
    assert cost.seconds(10, 30) == 6 * 4
    assert cost.seconds(0, 30) == 1
    assert MigrationCost().seconds(40_000, 0) == pytest.approx(0.733)


# Every decision, over random sessions.


@given(st.lists(finished, max_size=6), st.lists(tool_returns, max_size=5), requests, views)
def test_with_the_same_evidence_and_loads_a_move_is_never_undone(
    history: list[Trajectory], returned: list[ToolReturn], request: TurnRequest, now: View
) -> None:
    policy = CMLFQ(MigrationCost(0, 0))  # nothing but the costs themselves holds it back
    for number, trajectory in enumerate(history):
        policy.finished(replace(trajectory, id=f"done {number}"))
    placement = policy.place(request, now)
    for each in returned:
        placement = policy.tool_returned(request, each, now)
    been = []
    for _ in range(8):
        if placement is None:
            return
        if not been or placement.instance != been[-1]:
            been.append(placement.instance)
        placement = policy.place(request, now)
    assert len(set(been)) == len(been)
    assert len(been) <= 2  # a first placement looks farther ahead than a move


@given(
    st.lists(finished, min_size=1, max_size=6),
    st.lists(tool_returns, max_size=5),
    requests,
    views,
    st.sampled_from([0.0, 1e-5, 1e-2]),
)
def test_a_placement_is_the_cheapest_of_all_instances_of_its_reach(
    history: list[Trajectory], returned: list[ToolReturn], request: TurnRequest, now: View, per_token: float
) -> None:
    policy = CMLFQ(MigrationCost(0.1, per_token))
    for number, trajectory in enumerate(history):
        policy.finished(replace(trajectory, id=f"done {number}"))
    policy.place(request, now)
    states = [ToolState(it.tool, payload_class(it.returned_tokens), it.status) for it in returned]
    for each in returned:
        policy.tool_returned(request, each, now)
    for instance in now.instances:
        policy.instance_gone(instance.id)  # so it is a first placement
    placement = policy.place(request, now)
    fit = [it for it in now.instances if request.context_tokens + now.turn_tokens <= it.capacity_tokens]
    if placement is None:
        assert not fit
        return
    remaining = policy._hierarchy.predict(request, states)
    assert remaining is not None
    mean_load = sum(it.load_tokens for it in fit) / len(fit)

    def seconds(it: InstanceView) -> float:
        assert it.token_seconds is None
        return TOKEN_SECONDS * (1 + (it.load_tokens / mean_load if mean_load else 0)) / 2

    def cost(it: InstanceView) -> float:
        longer = [other for other in fit if other.bucket > it.bucket]
        moved = policy._migration.seconds(request.context_tokens, it.load_tokens)
        if not longer:
            return moved + remaining.mean * seconds(it)
        onward = min(longer, key=lambda other: (seconds(other), -other.bucket))
        reach = it.capacity_tokens - 2
        if request.context_tokens > reach:
            return math.inf
        here, beyond = remaining.cut(reach - request.context_tokens)
        later = beyond * policy._migration.seconds(reach, onward.load_tokens)
        return moved + here * seconds(it) + (remaining.mean - here) * seconds(onward) + later

    buckets = {it.bucket for it in fit}
    offers = [min((it for it in fit if it.bucket == b), key=lambda it: (it.load_tokens, it.id)) for b in buckets]
    chosen = next(it for it in offers if it.id == placement.instance)
    assert cost(chosen) <= min(cost(it) for it in offers) * (1 + 1e-9)
