"""The baselines: each rule as a table, and what all of them keep to as properties of random sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import LIMITS, OK, Event, decisions, events, tell

from libra.route.baselines import (
    MEMORY,
    Baseline,
    LeastLoaded,
    RemainingTable,
    RoundRobin,
    ShortestRemaining,
    TwoChoices,
)
from libra.route.policy import Fleet, Instance, InstanceView, Placement, ToolReturn, TurnRequest, View
from libra.route.tool_state import ToolState, remainders
from libra.trajectory import Trajectory, Turn

RULES: list[type[Baseline]] = [RoundRobin, LeastLoaded, TwoChoices]
every_rule = pytest.mark.parametrize("rule", RULES, ids=[rule.NAME for rule in RULES])

A = InstanceView("a", bucket=0, capacity_tokens=100, load_tokens=50)
B = InstanceView("b", bucket=0, capacity_tokens=100, load_tokens=20)
C = InstanceView("c", bucket=1, capacity_tokens=1_000, load_tokens=90)
D = InstanceView("d", bucket=1, capacity_tokens=1_000, load_tokens=20)


def view(*instances: InstanceView) -> View:
    return View(instances, LIMITS, 10)


def turn(trajectory: str = "t", context: int = 10) -> TurnRequest:
    return TurnRequest(trajectory, "p", 10, context)


def chosen(placement: Placement | None) -> str:
    assert placement is not None
    return placement.instance


@dataclass
class LiveInstance:
    """As a simulator's engine: its load changes under the policy's eyes."""

    id: str
    bucket: int = 0
    capacity_tokens: int = 1_000
    load_tokens: int = 0


class Watched(Sequence[Instance]):
    """Instances that can be looked at one by one, and count the looks, but not searched."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = instances
        self.looks = 0

    def __getitem__(self, position):  # type: ignore[no-untyped-def]
        self.looks += 1
        return self._instances[position]

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[Instance]:
        raise AssertionError("the fleet was searched")


@dataclass
class LiveFleet:
    instances: Sequence[Instance]
    limits: tuple[int, ...] = (1_000,)
    turn_tokens: int = 10


# Round robin.

TURNS = [
    ("in order, and round again", [(10, "abcd")] * 5, "abcda"),
    ("passing over what cannot hold it", [(500, "abcd")] * 3 + [(10, "abcd")], "cdcd"),
    ("one that fits where the rule stands", [(10, "abcd"), (500, "abcd"), (10, "abcd")], "acd"),
    ("nothing fits, and nothing is skipped for it", [(10, "ab"), (500, "ab"), (10, "ab")], "a-b"),
    ("nobody there, then somebody", [(10, ""), (10, "ab")], "-a"),
    ("a fleet that shrinks under it", [(10, "abcd")] * 3 + [(10, "ab")] * 2, "abcba"),
    ("a fleet that grows", [(10, "a"), (10, "a"), (10, "abc"), (10, "abc")], "aaab"),
]


@pytest.mark.parametrize(("asked", "wanted"), [case[1:] for case in TURNS], ids=[case[0] for case in TURNS])
def test_round_robin(asked: list[tuple[int, str]], wanted: str) -> None:
    policy = RoundRobin()
    found = ""
    for number, (context, there) in enumerate(asked):
        placement = policy.place(
            turn(f"t{number}", context), view(*(each for each in (A, B, C, D) if each.id in there))
        )
        found += "-" if placement is None else placement.instance
    assert found == wanted


def test_round_robin_gives_each_as_many() -> None:
    policy, fleet = RoundRobin(), LiveFleet([LiveInstance(str(number)) for number in range(7)])
    turns = Counter(chosen(policy.place(turn(str(number)), fleet)) for number in range(70))
    assert set(turns.values()) == {10}


# Least loaded.

LOADS = [
    ("the least, ties by id", (A, B, C, D), 10, Placement("b", 0, False, "least loaded")),
    ("whatever the order", (D, C, B, A), 10, Placement("b", 0, False, "least loaded")),
    ("of those that can hold it", (A, B, C, D), 91, Placement("d", 1, False, "least loaded")),
    ("the last token that fits", (B, C), 90, Placement("b", 0, False, "least loaded")),
    ("nothing holds it", (A, B, C, D), 991, None),
    ("nobody there", (), 10, None),
]


@pytest.mark.parametrize(("there", "context", "wanted"), [case[1:] for case in LOADS], ids=[case[0] for case in LOADS])
def test_least_loaded(there: tuple[InstanceView, ...], context: int, wanted: Placement | None) -> None:
    assert LeastLoaded().place(turn(context=context), view(*there)) == wanted


# Two choices.


@pytest.mark.parametrize(("small", "large"), [(0, 5), (4, 5), (3, 2), (9, 1), (0, 1), (0, 2)])
def test_every_pair_that_fits_is_drawn_as_often(small: int, large: int) -> None:
    # Of n instances, n - 1 - k of the n (n - 1) / 2 pairs have the one with k less loaded ones as their less loaded.
    # Instances that cannot hold the turn lie between them and have the least load.
    fits = [LiveInstance(f"large-{rank}", load_tokens=100 + rank) for rank in range(large)]
    fleet = LiveFleet(
        sorted(
            [*fits, *(LiveInstance(f"small-{n}", capacity_tokens=50) for n in range(small))], key=lambda it: it.id[-1]
        )
    )
    policy, draws = TwoChoices(sticky=False, seed=3), 6_000
    found = Counter(chosen(policy.place(turn(context=100), fleet)) for _ in range(draws))
    pairs = large * (large - 1) / 2
    share = [(large - 1 - rank) / pairs if pairs else 1.0 for rank in range(large)]
    for instance, expected in zip(fits, share, strict=True):
        # Five standard deviations; never the most loaded one.
        assert abs(found[instance.id] - draws * expected) <= 5 * (draws * expected * (1 - expected)) ** 0.5


@pytest.mark.parametrize("seed", range(5))
def test_two_choices_balance_better_than_one(seed: int) -> None:
    instances = [LiveInstance(str(number)) for number in range(1_000)]
    fleet, policy = LiveFleet(instances), TwoChoices(seed=seed)
    by_id = {instance.id: instance for instance in instances}
    for ball in range(1_000):
        by_id[chosen(policy.place(turn(str(ball)), fleet))].load_tokens += 1
    one_draw = Random(seed)
    fullest_of_one_draw = max(Counter(one_draw.randrange(1_000) for _ in range(1_000)).values())
    fullest = max(instance.load_tokens for instance in instances)
    assert fullest < fullest_of_one_draw
    assert fullest <= 4  # ln ln 1000 / ln 2 = 2.8, and a constant
    assert sum(instance.load_tokens for instance in instances) == 1_000


def test_the_seed_decides() -> None:
    fleet = LiveFleet([LiveInstance(str(number)) for number in range(50)])

    def run(seed: int) -> list[str]:
        policy = TwoChoices(seed=seed)
        return [chosen(policy.place(turn(str(number)), fleet)) for number in range(50)]

    assert run(1) == run(1)
    assert run(1) != run(2)


# What a decision costs.


@pytest.mark.parametrize("policy", [RoundRobin(), TwoChoices()], ids=lambda policy: policy.NAME)
def test_a_decision_looks_at_a_few_instances_of_a_large_fleet(policy: Baseline) -> None:
    watched = Watched([LiveInstance(str(number)) for number in range(1_024)])
    fleet: Fleet = LiveFleet(watched)
    for number in range(100):
        policy.place(turn(str(number)), fleet)
        first = watched.looks
        policy.tool_returned(turn(str(number), 20), OK, fleet)
        assert watched.looks - first <= 4  # found where it was before
    assert watched.looks <= 100 * (6 + 4)


# Following the prefix.


@every_rule
def test_a_later_turn_follows_the_prefix_while_it_can(rule: type[Baseline]) -> None:
    policy = rule()
    assert chosen(policy.place(turn(), view(A))) == "a"
    stays = Placement("a", 0, False, "holds the prefix")
    assert policy.tool_returned(turn(context=20), OK, view(A, B, C, D)) == stays
    assert policy.tool_returned(turn(context=30), OK, view(B, C, D, A)) == stays  # found at another place
    assert policy.place(turn(context=90), view(C, D, A)) == stays  # asked again, and as long as fits
    # Too long for it, then it is left out, then it is back: the prefix is where the latest turn went.
    moved = policy.tool_returned(turn(context=91), OK, view(A, C))
    assert moved == Placement("c", 1, True, rule.REASON)
    assert policy.tool_returned(turn(context=92), OK, view(A, D)) == Placement("d", 1, True, rule.REASON)
    assert policy.tool_returned(turn(context=93), OK, view(A, C, D)) == Placement("d", 1, False, "holds the prefix")


@every_rule
def test_without_sticky_the_rule_decides_every_turn(rule: type[Baseline]) -> None:
    policy = rule(sticky=False)
    policy.place(turn(), view(C))
    assert policy.tool_returned(turn(), OK, view(B)) == Placement("b", 0, True, rule.REASON)
    assert policy.tool_returned(turn(), OK, view(B)) == Placement("b", 0, False, rule.REASON)


# Every decision, over random sessions.


@every_rule
@given(session=st.lists(events, max_size=25), sticky=st.booleans())
def test_every_decision_is_the_rules(rule: type[Baseline], session: list[Event], sticky: bool) -> None:
    for it in decisions(rule(sticky=sticky), session):
        loads = sorted((each.load_tokens, each.id) for each in it.fit.values())
        if sticky and it.prefix_at in it.fit:
            assert (it.placement.instance, it.placement.reason) == (it.prefix_at, "holds the prefix")
        else:
            assert it.placement.reason == rule.REASON
            assert rule is not LeastLoaded or it.placement.instance == loads[0][1]
            assert rule is not TwoChoices or len(loads) == 1 or it.placement.instance != loads[-1][1]


# Shortest remaining first: least loaded in all but the priority, and the priority from a table of means.

GOOD, BAD = ToolState("search", "small", "ok"), ToolState("search", "small", "error")
FAIL = ToolReturn("search", "error", 5)
states = st.none() | st.sampled_from([GOOD, BAD])
ONE = View((InstanceView("a", 0, 9_000, 0),), LIMITS, 10)


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
    first = policy.place(TurnRequest("t", "p", 10, 10, "task"), ONE)
    assert first is not None and first.priority == 0
    policy.finished(done(Turn(10, "search", "ok", 5), Turn(20, "search", "error", 5)))
    policy.finished(done(Turn(100, "search", "ok", 5), id="other", task="other"))

    def priority(task: str, *returned: ToolReturn) -> int:
        policy.place(TurnRequest("t", "p", 10, 10, task), ONE)
        for each in returned:
            policy.tool_returned(TurnRequest("t", "p", 10, 10, task), each, ONE)
        again = policy.place(TurnRequest("t", "p", 10, 10, task), ONE)  # which does not forget the last return
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


@given(st.lists(events, max_size=25), st.booleans())
def test_it_places_as_least_loaded(session: list[Event], sticky: bool) -> None:
    policy, least = ShortestRemaining(sticky=sticky), LeastLoaded(sticky=sticky)
    for event in session:
        expected, placement = tell(least, event), tell(policy, event)
        assert (placement and replace(placement, priority=0)) == expected
        assert placement is None or placement.priority >= 0
