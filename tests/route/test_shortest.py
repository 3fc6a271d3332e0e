"""Shortest remaining first: least loaded in all but the priority, and the priority from a table of means."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import LIMITS, OK, Event, events, tell

from libra.route.baselines import MEMORY, LeastLoaded, RemainingTable, ShortestRemaining
from libra.route.policy import InstanceView, ToolReturn, TurnRequest, View
from libra.route.tool_state import ToolState, remainders
from libra.trajectory import Trajectory, Turn

GOOD, BAD = ToolState("search", "small", "ok"), ToolState("search", "small", "error")
FAIL = ToolReturn("search", "error", 5)
states = st.none() | st.sampled_from([GOOD, BAD])
FLEET = View((InstanceView("a", 0, 9_000, 0),), LIMITS, 10)


def done(*turns: Turn, id: str = "done", task: str = "task") -> Trajectory:
    return Trajectory(id, "p", task, 10, (*turns, Turn(30, None, None, 0)), None, 0, finished=True)


def test_remainders() -> None:
    trajectory = done(Turn(10, "search", "ok", 5), Turn(20, "search", "error", 600))
    error = ToolState("search", "medium", "error")
    assert list(remainders(trajectory)) == [(0, None, 665), (1, GOOD, 650), (2, error, 30)]


@given(st.lists(st.tuples(st.sampled_from("mn"), states, st.integers(0, 1_000)), max_size=30), states)
def test_means_are_of_the_row_or_of_the_state_or_of_everything(
    samples: list[tuple[str, ToolState | None, int]], state: ToolState | None
) -> None:
    table = RemainingTable()
    for sample in samples:
        table.add(*sample)
    for task in "mno":
        of_row = [n for t, s, n in samples if (t, s) == (task, state)]
        of_state = [n for _, s, n in samples if s == state]
        evidence = of_row or of_state or [n for _, _, n in samples]
        mean = table.mean(task, state)
        assert mean == (pytest.approx(sum(evidence) / len(evidence)) if evidence else None)


def test_old_samples_fade() -> None:
    table = RemainingTable()
    for remaining in [0] * MEMORY + [1_000] * 100:
        table.add("m", GOOD, remaining)
    assert table.mean("m", GOOD) == pytest.approx(1_000 * (1 - (1 - 1 / MEMORY) ** 100))


@given(st.lists(st.tuples(st.text("mnop", min_size=1, max_size=2), states), max_size=40), st.integers(2, 6))
def test_the_table_stays_small_and_keeps_what_was_updated_last(
    samples: list[tuple[str, ToolState | None]], max_rows: int
) -> None:
    table = RemainingTable(max_rows)
    updated: list[tuple[str | None, ToolState | None]] = []
    for task, state in samples:
        table.add(task, state, 1)
        for row in ((None, state), (task, state)):
            updated = [*(other for other in updated if other != row), row]
        assert len(table) <= max_rows
    kept = [(row[0], row[1] and ToolState(*row[1])) for row in table.snapshot()[1:]]
    assert kept == updated[-max_rows:]


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_rows is 1"):
        RemainingTable(1)


# The policy.


def test_the_priority_is_what_is_expected_to_remain() -> None:
    policy = ShortestRemaining()
    first = policy.place(TurnRequest("t", "p", 10, 10, "task"), FLEET)
    assert first is not None and first.priority == 0
    policy.finished(done(Turn(10, "search", "ok", 5), Turn(20, "search", "error", 5)))
    policy.finished(done(Turn(100, "search", "ok", 5), id="other", task="other"))

    def priority(task: str, *returned: ToolReturn) -> int:
        policy.place(TurnRequest("t", "p", 10, 10, task), FLEET)
        for each in returned:
            policy.tool_returned(TurnRequest("t", "p", 10, 10, task), each, FLEET)
        again = policy.place(TurnRequest("t", "p", 10, 10, task), FLEET)  # which does not forget the last return
        policy.forget("t")
        assert again is not None
        return again.priority

    assert priority("task") == 70
    assert priority("other") == 135
    assert priority("task", OK) == 55
    assert priority("other", OK) == 30
    assert priority("", OK) == 42  # (55 + 30) / 2, to even
    assert priority("task", OK, FAIL) == 30
    assert priority("task", ToolReturn("shell", "ok", 5)) == 64  # (70 + 55 + 30 + 135 + 30) / 5


def test_an_unfinished_trajectory_is_refused() -> None:
    with pytest.raises(ValueError, match="'t' is unfinished"):
        ShortestRemaining().finished(Trajectory("t", "p", "task", 5, (), None, 0, finished=False))


def test_an_abandoned_trajectory_leaves_nothing() -> None:
    policy = ShortestRemaining()
    policy.place(TurnRequest("t", "p", 10, 10), FLEET)
    policy.tool_returned(TurnRequest("t", "p", 10, 10), OK, FLEET)
    policy.forget("t")
    assert policy.snapshot() == ShortestRemaining().snapshot()


@given(st.lists(events, max_size=25), st.booleans())
def test_it_places_as_least_loaded(session: list[Event], sticky: bool) -> None:
    policy, least = ShortestRemaining(sticky=sticky), LeastLoaded(sticky=sticky)
    for event in session:
        expected, placement = tell(least, event), tell(policy, event)
        assert (placement and replace(placement, priority=0)) == expected
        assert placement is None or placement.priority >= 0


@given(st.lists(events, max_size=15), st.lists(events, max_size=15), st.booleans())
def test_a_restored_policy_decides_as_the_original(before: list[Event], after: list[Event], sticky: bool) -> None:
    policy = ShortestRemaining(sticky=sticky)
    for event in before:
        tell(policy, event)
    twin = ShortestRemaining.restore(json.loads(json.dumps(policy.snapshot())))
    for event in after:
        assert tell(twin, event) == tell(policy, event)
    assert twin.snapshot() == policy.snapshot()
