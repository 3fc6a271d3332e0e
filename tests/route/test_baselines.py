"""The baselines: each rule as a table, and what all of them keep to as properties of random sessions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import LIMITS, OK, Event, events, tell

from libra.route.baselines import Baseline, LeastLoaded, RoundRobin, TwoChoices
from libra.route.policy import Fleet, Instance, InstanceView, Placement, TurnRequest, View
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


@every_rule
def test_nothing_is_kept_of_what_is_over(rule: type[Baseline]) -> None:
    policy, fleet = rule(), view(A, B, C, D)
    fresh = rule().snapshot()
    for number in range(20):
        policy.place(turn(f"t{number}"), fleet)
    assert len(policy.snapshot()["live"]) == 20
    for number in range(0, 20, 2):
        policy.finished(Trajectory(f"t{number}", "p", "task", 10, (Turn(5, None, None, 0),), None, 0, finished=True))
        policy.forget(f"t{number + 1}")
        policy.forget(f"t{number + 1}")
    assert policy.snapshot()["live"] == fresh["live"] == []


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
def test_a_prefix_that_is_gone_is_not_followed(rule: type[Baseline]) -> None:
    policy = rule()
    policy.place(turn(), view(D))
    policy.instance_gone("d")
    idle = InstanceView("z", 0, 100, 0)
    returned = policy.tool_returned(turn(), OK, view(idle))
    assert returned == Placement("z", 0, True, rule.REASON)
    policy.instance_gone("z")
    assert policy.tool_returned(turn(), OK, view(idle)) == Placement("z", 0, False, rule.REASON)  # of the same name


@every_rule
def test_without_sticky_the_rule_decides_every_turn(rule: type[Baseline]) -> None:
    policy = rule(sticky=False)
    policy.place(turn(), view(C))
    assert policy.tool_returned(turn(), OK, view(B)) == Placement("b", 0, True, rule.REASON)
    assert policy.tool_returned(turn(), OK, view(B)) == Placement("b", 0, False, rule.REASON)


@every_rule
def test_a_return_for_what_was_never_placed_is_refused(rule: type[Baseline]) -> None:
    policy = rule()
    with pytest.raises(ValueError, match="'t' was never placed: call place"):
        policy.tool_returned(turn(), OK, view(A))
    assert policy.place(turn(), view()) is None
    assert chosen(policy.tool_returned(turn(), OK, view(A))) == "a"  # it waited in vain, and was placed all the same


@every_rule
@pytest.mark.parametrize("field", [{"format": 2}, {"policy": "cmlfq-published"}])
def test_a_snapshot_of_another_policy_is_refused(rule: type[Baseline], field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"this is '{rule.NAME}' format 1"):
        rule.restore(rule().snapshot() | field)


# Every decision, over random sessions.


@every_rule
@given(session=st.lists(events, max_size=25), sticky=st.booleans())
def test_every_decision_is_eligible_told_truly_and_the_rules(
    rule: type[Baseline], session: list[Event], sticky: bool
) -> None:
    policy, twin = rule(sticky=sticky), rule(sticky=sticky)
    served: dict[str, str] = {}
    prefixes: dict[str, str] = {}
    for event in session:
        placement = tell(policy, event)
        assert tell(twin, event) == placement
        if isinstance(event, Trajectory):
            served.pop(event.id, None)
            prefixes.pop(event.id, None)
        elif isinstance(event, str):
            prefixes = {trajectory: instance for trajectory, instance in prefixes.items() if instance != event}
        else:
            request, _, now = event
            fit = {i.id: i for i in now.instances if request.context_tokens + now.turn_tokens <= i.capacity_tokens}
            if placement is None:
                assert not fit
                continue
            assert placement.bucket == fit[placement.instance].bucket
            assert placement.migrated == (served.get(request.trajectory_id, placement.instance) != placement.instance)
            loads = sorted((i.load_tokens, i.id) for i in fit.values())
            if sticky and prefixes.get(request.trajectory_id) in fit:
                assert placement.instance == prefixes[request.trajectory_id]
                assert placement.reason == "holds the prefix"
            else:
                assert placement.reason == rule.REASON
                assert rule is not LeastLoaded or placement.instance == loads[0][1]
                assert rule is not TwoChoices or len(loads) == 1 or placement.instance != loads[-1][1]
            served[request.trajectory_id] = prefixes[request.trajectory_id] = placement.instance


@every_rule
@given(before=st.lists(events, max_size=15), after=st.lists(events, max_size=15), sticky=st.booleans())
def test_a_restored_baseline_decides_as_the_original(
    rule: type[Baseline], before: list[Event], after: list[Event], sticky: bool
) -> None:
    policy = rule(sticky=sticky)
    for event in before:
        tell(policy, event)
    twin = rule.restore(json.loads(json.dumps(policy.snapshot())))
    for event in after:
        assert tell(twin, event) == tell(policy, event)
    assert twin.snapshot() == policy.snapshot()
