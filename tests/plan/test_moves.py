"""Moves between allocations: minimal, complete, ordered, and priced."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.small_request import one_bucket, two_buckets

from libra.cost.device import SwitchCost
from libra.plan.problem import Allocation, Bucket
from libra.plan.transition import Move, diff, seconds

SWITCH = SwitchCost(engine_start=8.0, trainer_join=3.0, weight_load=0.5)
TO_SHORT, TO_LONG = Move("train->rollout", None, "short"), Move("train->rollout", None, "long")
REBUCKET = Move("rebucket")

STEPS = [
    ("nothing", two_buckets(1, 1, 2), two_buckets(1, 1, 2), (), 0.0),
    ("ranges only", two_buckets(1, 1, 2, cut=1000), two_buckets(1, 1, 2, cut=1500), (REBUCKET,), 0.0),
    ("trainer to rollout", two_buckets(2, 1, 1), two_buckets(1, 2, 1), (TO_SHORT,), 8.0),
    ("rollout to trainer", two_buckets(1, 1, 2), two_buckets(2, 1, 1), (Move("rollout->train", "long"),), 3.0),
    ("resize", two_buckets(1, 2, 1), two_buckets(1, 1, 2), (Move("resize", "short", "long"),), 8.0),
    ("a bucket less", two_buckets(1, 1, 2), one_bucket(1, 3), (Move("resize", "short", "long"), REBUCKET), 8.0),
    (
        "trainers first, the longest shape first",
        two_buckets(3, 2, 1),
        two_buckets(1, 1, 4),
        (TO_LONG, TO_LONG, Move("resize", "short", "long")),
        24.0,
    ),
    (
        "trainers last",
        two_buckets(1, 3, 1),
        two_buckets(2, 1, 2),
        (Move("resize", "short", "long"), Move("rollout->train", "short")),
        11.0,
    ),
    (
        "a device has come back",
        two_buckets(1, 1, 1),
        two_buckets(1, 2, 1),
        (Move("idle->rollout", None, "short"),),
        8.0,
    ),
    ("it trains", two_buckets(1, 1, 1), two_buckets(2, 1, 1), (Move("idle->train"),), 3.0),
    ("a device was lost", two_buckets(1, 2, 1), two_buckets(1, 1, 1), (), 0.0),
]


@pytest.mark.parametrize(
    ("current", "wanted", "moves", "cost"), [row[1:] for row in STEPS], ids=[row[0] for row in STEPS]
)
def test_diff_and_its_seconds(current: Allocation, wanted: Allocation, moves: tuple[Move, ...], cost: float) -> None:
    assert diff(current, wanted) == moves
    assert seconds(moves, SWITCH) == cost


def test_the_new_longest_shape_is_started_before_the_old_one_is_stopped() -> None:
    current = Allocation(1, (Bucket("small", 1, 0, 10), Bucket("large", 1, 10, 100)))
    wanted = Allocation(1, (Bucket("medium", 1, 0, 50), Bucket("huge", 1, 50, 100)))
    assert diff(current, wanted) == (Move("resize", "small", "huge"), Move("resize", "large", "medium"), REBUCKET)


def test_a_move_reads_as_text() -> None:
    moves = (Move("resize", "short", "long"), TO_LONG, Move("rollout->train", "short"), REBUCKET)
    texts = ["resize (short -> long)", "train->rollout (long)", "rollout->train (short)", "rebucket"]
    assert [str(move) for move in moves] == texts


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    shapes = draw(st.lists(st.sampled_from(["a", "b", "c"]), unique=True, min_size=1).map(sorted))
    buckets = tuple(
        Bucket(shape, draw(st.integers(1, 2)), 100 * index, 100 * (index + 1)) for index, shape in enumerate(shapes)
    )
    return Allocation(draw(st.integers(1, 3)), buckets)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Allocation, Allocation]:
    current, wanted = draw(allocations()), draw(allocations())
    short = (current.replicas + current.engines) - (wanted.replicas + wanted.engines)
    wanted = Allocation(wanted.replicas + max(0, short), wanted.buckets)
    return current, wanted


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_no_assignment_of_devices_to_roles_changes_fewer(pair: tuple[Allocation, Allocation]) -> None:
    current, wanted = pair
    moves = diff(current, wanted)
    device_moves = [move for move in moves if move.kind != "rebucket"]
    assert len(device_moves) == fewest_changes(roles(current, wanted), tuple(roles(wanted, wanted)))


@settings(max_examples=150, deadline=None)
@given(pairs())
def test_the_moves_lead_there_and_the_longest_contexts_are_held_all_the_way(
    pair: tuple[Allocation, Allocation],
) -> None:
    current, wanted = pair
    holds_longest = {current.buckets[-1].shape, wanted.buckets[-1].shape}
    state = Counter(roles(current, wanted))
    for move in diff(current, wanted):
        if move.kind != "rebucket":
            source = "idle" if move.kind.startswith("idle") else move.stops or "train"
            assert state[source] > 0
            state[source] -= 1
            state[move.starts or "train"] += 1
        assert any(state[shape] for shape in holds_longest)
        assert min(current.replicas, wanted.replicas) <= state["train"] <= max(current.replicas, wanted.replicas)
    assert +state == Counter(roles(wanted, wanted))


def roles(allocation: Allocation, wanted: Allocation) -> list[str]:
    engines = [bucket.shape for bucket in allocation.buckets for _ in range(bucket.engines)]
    idle = wanted.replicas + wanted.engines - allocation.replicas - len(engines)
    return ["train"] * allocation.replicas + engines + ["idle"] * idle


def fewest_changes(before: list[str], after: tuple[str, ...]) -> int:
    """By trying every role for every device; devices that get the same role are interchangeable."""
    if not before:
        return 0
    return min(
        (before[0] != role) + fewest_changes(before[1:], after[: after.index(role)] + after[after.index(role) + 1 :])
        for role in sorted(set(after))
    )
