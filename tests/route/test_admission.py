"""Admission against a model that is too simple to be wrong, under any order of completion."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.route.admission import Admission


def started(admission: Admission[int], *groups: str) -> None:
    for group in groups:
        admission.start(group)


def completed(admission: Admission[int], *groups: str) -> None:
    for group in groups:
        for episode in range(admission.group_size):
            admission.finish(group, episode)


def names(batch: list[tuple[str, list[int]]]) -> list[str]:
    return [group for group, _ in batch]


def stepped(admission: Admission[int]) -> list[str]:
    """Take a batch and publish what it made."""
    batch = names(admission.take())
    admission.publish(admission.taken)
    return batch


@pytest.mark.parametrize(
    ("staleness", "started_before", "may_start"),
    [(0, 0, True), (0, 1, True), (0, 2, False), (1, 3, True), (1, 4, False), (2, 5, True), (2, 6, False)],
)
def test_how_many_may_start(staleness: int, started_before: int, may_start: bool) -> None:
    admission: Admission[int] = Admission(groups_per_step=2, group_size=1, max_staleness=staleness)
    started(admission, *(f"g{number}" for number in range(started_before)))
    assert admission.may_start() is may_start
    assert admission.in_flight == started_before


@pytest.mark.parametrize(
    ("name", "complete", "wanted"),
    [
        ("too few are complete", ("b",), None),
        ("the oldest complete ones", ("a", "b", "c"), ["a", "b"]),
        ("one that is not due may be overtaken", ("d", "b"), ["b", "d"]),
    ],
)
def test_which_groups_make_the_first_batch(name: str, complete: tuple[str, ...], wanted: list[str] | None) -> None:
    admission: Admission[int] = Admission(groups_per_step=2, group_size=3, max_staleness=1)
    started(admission, "a", "b", "c", "d")
    completed(admission, *complete)
    assert admission.ready() is (wanted is not None), name
    if wanted is not None:
        assert names(admission.take()) == wanted, name


def test_a_batch_waits_for_a_group_that_must_be_in_it() -> None:
    admission: Admission[int] = Admission(groups_per_step=1, group_size=1, max_staleness=1)
    started(admission, "slow", "fast")
    completed(admission, "fast")
    assert stepped(admission) == ["fast"]
    started(admission, "next")
    completed(admission, "next")
    assert not admission.ready()  # slow was started under version 0: the batch that makes version 2 is its last
    completed(admission, "slow")
    assert stepped(admission) == ["slow"]
    assert stepped(admission) == ["next"]


def test_a_batch_keeps_room_for_groups_that_could_not_all_be_in_the_next_one() -> None:
    admission: Admission[int] = Admission(groups_per_step=1, group_size=1, max_staleness=2)
    started(admission, "a", "b", "c")
    completed(admission, "c")
    assert stepped(admission) == ["c"]
    started(admission, "d")
    completed(admission, "d")
    assert not admission.ready()  # a and b are both due with version 3: one of them must go now
    completed(admission, "b")
    assert stepped(admission) == ["b"]
    completed(admission, "a")
    assert stepped(admission) == ["a"]


def test_an_unpublished_batch_still_counts() -> None:
    admission: Admission[int] = Admission(groups_per_step=2, group_size=1, max_staleness=1)
    started(admission, "a", "b", "c", "d")
    completed(admission, "a", "b")
    admission.take()
    assert (admission.in_flight, admission.may_start()) == (4, False)
    admission.publish(1)
    assert (admission.in_flight, admission.may_start()) == (2, True)


def test_a_resumed_run_counts_from_its_version() -> None:
    admission: Admission[int] = Admission(groups_per_step=1, group_size=1, max_staleness=0, version=7)
    started(admission, "a")
    completed(admission, "a")
    assert stepped(admission) == ["a"]
    assert (admission.published, admission.in_flight) == (8, 0)


def test_groups_that_were_under_way_are_taken_up_as_they_were() -> None:
    admission: Admission[int] = Admission(groups_per_step=1, group_size=2, max_staleness=1, version=7)
    admission.resume("slow", 6, [0])
    admission.resume("next", 7, [])
    assert (admission.in_flight, admission.may_start(), admission.ready()) == (2, False, False)
    completed(admission, "next")
    assert not admission.ready()  # slow was started under version 6: the batch that makes version 8 is its last
    admission.finish("slow", 1)
    assert admission.take() == [("slow", [0, 1])]


def test_what_cannot_have_been_under_way_is_refused() -> None:
    admission: Admission[int] = Admission(groups_per_step=1, group_size=1, max_staleness=1, version=7)
    with pytest.raises(ValueError, match="group a was started under version 8, after 7"):
        admission.resume("a", 8, [])
    with pytest.raises(ValueError, match="is too old to train on within 1 versions"):
        admission.resume("a", 5, [])
    with pytest.raises(ValueError, match="already has its 1 episodes"):
        admission.resume("b", 7, [0, 1])


def test_what_is_refused() -> None:
    admission: Admission[int] = Admission(groups_per_step=2, group_size=1, max_staleness=0)
    started(admission, "a")
    with pytest.raises(ValueError, match="a was started before"):
        admission.start("a")
    with pytest.raises(ValueError, match="not complete"):
        admission.take()
    started(admission, "b")
    with pytest.raises(ValueError, match="2 groups are in flight"):
        admission.start("c")
    completed(admission, "a")
    with pytest.raises(ValueError, match="has its 1 episodes"):
        admission.finish("a", 1)
    with pytest.raises(KeyError):
        admission.finish("z", 0)
    for version in (-1, 1):
        with pytest.raises(ValueError, match="cannot be published"):
            admission.publish(version)


def test_a_batch_is_taken_in_parts_as_its_groups_are_complete() -> None:
    admission: Admission[int] = Admission(groups_per_step=2, group_size=1, max_staleness=1)
    started(admission, "a", "b", "c", "d")
    assert (admission.take_part(), admission.lacks) == ([], 2)
    completed(admission, "c")
    assert (names(admission.take_part()), admission.lacks, admission.taken) == (["c"], 1, 0)
    assert admission.in_flight == 4
    completed(admission, "d")
    assert names(admission.take_part()) == ["d"]
    assert (admission.lacks, admission.taken) == (2, 1)
    admission.publish(1)
    started(admission, "e", "f")
    completed(admission, "e", "f")
    assert admission.take_part() == []  # a and b were started under version 0: they are the next batch
    completed(admission, "b")
    assert names(admission.take_part()) == ["b"]
    with pytest.raises(ValueError, match="1 groups of the next batch have been taken already"):
        admission.take()


@given(st.data())
def test_parts_keep_every_group_in_time_and_never_stand_still(data: st.DataObject) -> None:
    groups_per_step, staleness = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    admission: Admission[str] = Admission(groups_per_step, 1, staleness)
    started_at: dict[str, int] = {}
    running: list[str] = []
    trained: dict[str, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        while admission.may_start():
            name = f"g{len(started_at)}"
            admission.start(name)
            started_at[name] = admission.published
            running.append(name)
        if running:
            name = running.pop(data.draw(st.integers(0, len(running) - 1)))
            admission.finish(name, name)
        version = admission.taken + 1
        for name, episodes in admission.take_part():
            assert episodes == [name] and name not in trained
            trained[name] = version
            assert version <= started_at[name] + 1 + staleness
        assert running or admission.lacks == groups_per_step, "all is complete, and yet a batch lacks something"
        if data.draw(st.booleans()) or not running:
            admission.publish(admission.taken)
        assert admission.in_flight <= (1 + staleness) * groups_per_step


@dataclass
class Model:
    """What happened, in plain lists."""

    groups_per_step: int
    group_size: int
    staleness: int
    started_at: dict[str, int] = field(default_factory=dict)
    episodes: dict[str, list[str]] = field(default_factory=dict)
    batches: list[list[str]] = field(default_factory=list)
    published: int = 0

    def used(self) -> list[str]:
        return [group for batch in self.batches for group in batch]

    def in_flight(self) -> int:
        return len(self.started_at) - self.groups_per_step * self.published

    def unfinished(self) -> list[str]:
        return [group for group, episodes in self.episodes.items() if len(episodes) < self.group_size]

    def check_batch(self, batch: list[tuple[str, list[str]]]) -> None:
        assert len(batch) == self.groups_per_step
        assert not {group for group, _ in batch} & set(self.used()), "used twice"
        for group, episodes in batch:
            assert episodes == self.episodes[group]
            assert len(episodes) == self.group_size
            trained_policy = len(self.batches)  # the version that this batch improves on
            assert trained_policy - self.started_at[group] <= self.staleness


@settings(deadline=None)
@given(
    groups_per_step=st.integers(1, 3),
    group_size=st.integers(1, 3),
    staleness=st.integers(0, 4),
    steps=st.integers(1, 6),
    eager=st.booleans(),
    interruptions=st.sets(st.integers(0, 80), max_size=6),
    chance=st.randoms(use_true_random=False),
)
def test_any_schedule_ends_with_every_group_used_once(
    groups_per_step: int,
    group_size: int,
    staleness: int,
    steps: int,
    eager: bool,
    interruptions: set[int],
    chance: random.Random,
) -> None:
    admission: Admission[str] = Admission(groups_per_step, group_size, staleness)
    model = Model(groups_per_step, group_size, staleness)
    most = (1 + staleness) * groups_per_step
    events = 0
    while model.published < steps:
        training = len(model.batches) > model.published
        unfinished = model.unfinished()
        may_start = model.in_flight() < most
        assert admission.may_start() is may_start
        assert admission.in_flight == model.in_flight() <= most
        if training and staleness == 0:
            assert not unfinished
            assert not may_start
        possible = []
        if may_start and len(model.started_at) < steps * groups_per_step:
            possible.append("start")
        if unfinished:
            possible.append("finish")
        if training:
            possible.append("publish")
        elif admission.ready():
            possible.append("take")
        assert possible, "deadlock: nothing can happen any more"
        match "start" if eager and "start" in possible else chance.choice(possible):
            case "start":
                group = f"g{len(model.started_at)}"
                admission.start(group)
                model.started_at[group], model.episodes[group] = model.published, []
            case "finish":
                group = chance.choice(unfinished)
                episode = f"{group}-{len(model.episodes[group])}"
                admission.finish(group, episode)
                model.episodes[group].append(episode)
            case "take":
                batch = admission.take()
                model.check_batch(batch)
                model.batches.append([group for group, _ in batch])
            case "publish":
                model.published += 1
                admission.publish(model.published)
        if events in interruptions:  # every batch that was taken is trained on before anything else
            model.published = len(model.batches)
            admission = Admission(groups_per_step, group_size, staleness, model.published)
            for group in [group for group in model.started_at if group not in model.used()]:
                admission.resume(group, model.started_at[group], list(model.episodes[group]))
        events += 1
    assert sorted(model.used()) == sorted(model.started_at)
    assert len(model.used()) == steps * groups_per_step
    assert admission.in_flight == 0
