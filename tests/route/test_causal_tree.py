"""The tree's statistics against a recount of the trajectories that it was given."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libra.route.published import RECENT, CausalTree, Estimate, Node
from libra.route.tool_state import ToolState, payload_class
from libra.trajectory import Trajectory, Turn

OK = ToolState("search", "small", "ok")
FAIL = ToolState("search", "small", "error")


def turn(generated: int, state: ToolState, returned: int) -> Turn:
    return Turn(generated, state.tool, state.status, returned)


def last(generated: int) -> Turn:
    return Turn(generated, None, None, 0)


def done(prompt_id: str, *turns: Turn) -> Trajectory:
    return Trajectory("t", prompt_id, "task", 10, turns, None, 0, finished=True)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [(0, "small"), (500, "small"), (501, "medium"), (5_000, "medium"), (5_001, "large"), (90_000, "large")],
)
def test_payload_classes(tokens: int, wanted: str) -> None:
    assert payload_class(tokens) == wanted


HISTORY = (
    done("p", turn(10, OK, 5), turn(20, OK, 5), last(30)),  # 70 in all, 55 after OK, 30 after OK OK
    done("p", turn(10, OK, 5), last(4)),  # 19 in all, 4 after OK
    done("p", turn(1, FAIL, 2), last(100)),  # 103 in all, 100 after FAIL
    done("q", last(8)),
)


@pytest.mark.parametrize(
    ("name", "prompt_id", "states", "wanted"),
    [
        ("start of a prompt", "p", [], Estimate(3, 64.0, 103)),
        ("one return", "p", [OK], Estimate(2, 29.5, 55)),
        ("the other return", "p", [FAIL], Estimate(1, 100.0, 100)),
        ("two returns", "p", [OK, OK], Estimate(1, 30.0, 30)),
        ("unseen third return falls back to two", "p", [OK, OK, OK], Estimate(1, 30.0, 30)),
        ("unseen second return falls back to one", "p", [OK, FAIL, OK], Estimate(2, 29.5, 55)),
        ("unseen first return falls back to the prompt", "q", [OK], Estimate(1, 8.0, 8)),
        ("unseen prompt falls back to all prompts", "new", [OK], Estimate(4, 50.0, 103)),
        ("payload class tells states apart", "p", [OK._replace(payload="large")], Estimate(3, 64.0, 103)),
    ],
)
def test_lookup(name: str, prompt_id: str, states: list[ToolState], wanted: Estimate) -> None:
    tree = CausalTree()
    for trajectory in HISTORY:
        tree.add(trajectory)
    assert tree.estimate(prompt_id, states) == wanted


def test_an_untaught_tree_estimates_nothing() -> None:
    assert CausalTree().estimate("p", [OK]) is None
    with pytest.raises(ValueError, match="no samples"):
        Node().estimate()


def test_a_turn_without_a_tool_lengthens_the_remainder_and_adds_no_state() -> None:
    tree = CausalTree()
    tree.add(done("p", turn(1, OK, 2), last(10), turn(3, FAIL, 4), last(5)))
    assert tree.estimate("p", [OK]) == Estimate(1, 22.0, 22)
    assert tree.estimate("p", [OK, FAIL]) == Estimate(1, 5.0, 5)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=3 * RECENT))
@example(list(range(RECENT + 1)))
@example(list(range(3 * RECENT)))
def test_node_statistics(remainders: list[int]) -> None:
    node = Node()
    for remaining in remainders:
        node.add(remaining)
    estimate, recent = node.estimate(), remainders[-RECENT:]
    assert sorted(node.recent) == sorted(recent)
    assert estimate.count == len(remainders)
    assert estimate.mean == sum(remainders) / len(remainders)
    covered = [value for value in recent if sum(other <= value for other in recent) * 10 >= 9 * len(recent)]
    assert estimate.p90 == min(covered)


states = st.builds(
    ToolState,
    st.sampled_from(["search", "code"]),
    st.sampled_from(["small", "large"]),
    st.sampled_from(["ok", "error"]),
)
tool_turns = st.builds(
    lambda generated, state, extra: turn(generated, state, extra + (5_001 if state.payload == "large" else 0)),
    st.integers(0, 50),
    states,
    st.integers(0, 500),
)
trajectories = st.builds(
    lambda prompt_id, turns, generated: done(prompt_id, *turns, last(generated)),
    st.sampled_from("pqr"),
    st.lists(tool_turns, max_size=4),
    st.integers(0, 1_000),
)


def states_of(trajectory: Trajectory) -> list[ToolState]:
    return [
        ToolState(turn.tool, payload_class(turn.returned_tokens), turn.status)
        for turn in trajectory.turns
        if turn.tool is not None and turn.status is not None
    ]


def recount(history: list[Trajectory], prompt_id: str, asked: list[ToolState]) -> Estimate | None:
    """The estimate by definition: every remainder behind the longest prefix that any trajectory shares."""
    own = [trajectory for trajectory in history if trajectory.prompt_id == prompt_id]
    for depth in range(len(asked), -1, -1):
        remainders = []
        for trajectory in own or history:
            if states_of(trajectory)[:depth] == asked[:depth] and (own or depth == 0):
                remainders.append(sum(t.generated_tokens + t.returned_tokens for t in trajectory.turns[depth:]))
        if remainders:
            recent = sorted(remainders[-RECENT:])
            return Estimate(
                len(remainders), sum(remainders) / len(remainders), recent[math.ceil(len(recent) * 9 / 10) - 1]
            )
    return None


@given(st.lists(trajectories, max_size=12), st.sampled_from("pqrs"), st.lists(states, max_size=5))
def test_statistics_are_a_recount(history: list[Trajectory], prompt_id: str, asked: list[ToolState]) -> None:
    tree = CausalTree()
    for trajectory in history:
        tree.add(trajectory)
    assert tree.estimate(prompt_id, asked) == recount(history, prompt_id, asked)
    for trajectory in history:
        walked = states_of(trajectory)
        for depth in range(len(walked) + 1):
            wanted = recount(history, trajectory.prompt_id, walked[:depth])
            assert tree.estimate(trajectory.prompt_id, walked[:depth]) == wanted


def test_the_least_recently_updated_prompt_is_evicted_whole() -> None:
    tree = CausalTree(max_nodes=5)
    tree.add(done("p", turn(1, OK, 1), last(1)))
    tree.add(done("q", turn(1, OK, 1), last(2)))
    tree.add(done("p", last(7)))
    tree.add(done("r", turn(1, OK, 1), last(3)))  # six nodes do not fit, and q is older than p
    assert tree.size == 4
    assert tree.estimate("p", [OK]) == Estimate(1, 1.0, 1)
    assert tree.estimate("r", [OK]) == Estimate(1, 3.0, 3)
    assert tree.estimate("q", [OK]) == Estimate(4, 4.75, 7)  # all prompts, the evicted one still counted


def test_a_prompt_that_fills_the_tree_stops_growing_and_goes_on_counting() -> None:
    tree = CausalTree(max_nodes=2)
    for _ in range(2):
        tree.add(done("p", turn(1, OK, 1), turn(1, OK, 1), last(5)))
    assert tree.size == 2
    assert tree.estimate("p", [OK, OK]) == Estimate(2, 7.0, 7)


def test_a_tree_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_nodes is 0"):
        CausalTree(max_nodes=0)


@given(st.lists(trajectories, max_size=20), st.integers(1, 8))
def test_size_is_counted_right_and_never_above_the_cap(history: list[Trajectory], cap: int) -> None:
    tree = CausalTree(cap)
    for trajectory in history:
        tree.add(trajectory)
        assert tree.size == len(tree.snapshot()["nodes"]) <= cap
        everyone = recount(history[: tree.trajectories], "unseen", [])
        assert tree.estimate("unseen", []) == everyone
        latest = tree.estimate(trajectory.prompt_id, [])
        assert latest is not None
        assert latest.count <= sum(t.prompt_id == trajectory.prompt_id for t in history[: tree.trajectories])


@given(st.lists(trajectories, max_size=12), st.lists(trajectories, max_size=12), st.integers(1, 12))
def test_a_restored_tree_goes_on_as_the_original(before: list[Trajectory], after: list[Trajectory], cap: int) -> None:
    tree = CausalTree(cap)
    for trajectory in before:
        tree.add(trajectory)
    written = json.dumps(tree.snapshot())
    twin = CausalTree.restore(json.loads(written))
    for trajectory in after:
        tree.add(trajectory)
        twin.add(trajectory)
        assert twin.snapshot() == tree.snapshot()


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    tree = CausalTree()
    tree.add(done("p", turn(1, OK, 1), last(5)))
    taken = tree.snapshot()
    written = json.dumps(taken)
    tree.add(done("p", turn(1, OK, 1), last(9)))
    assert json.dumps(taken) == written
    twin = CausalTree.restore(taken)
    twin.add(done("p", last(9)))
    assert json.dumps(taken) == written


def test_a_trajectory_deeper_than_the_stack_is_held_written_and_evicted() -> None:
    deep = [turn(1, OK, 1)] * 5_000
    tree = CausalTree(max_nodes=5_001)
    tree.add(done("p", *deep, last(3)))
    twin = CausalTree.restore(json.loads(json.dumps(tree.snapshot())))
    assert twin.estimate("p", [OK] * 5_000) == Estimate(1, 3.0, 3)
    twin.add(done("q", last(1)))
    assert twin.size == 1
