"""What the router sees of the engines, and who is woken when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes.engines import Script, ScriptedEngine
from fakes.scripted import FirstInstance, instance

from libra.loop.fleet import ServingFleet
from libra.plan.allocation import Allocation, Bucket
from libra.route.policy import InstanceView, View

TWO = Allocation(1, (Bucket("short", 1, 0, 40), Bucket("long", 1, 40, 160)))
ONE = Allocation(2, (Bucket("long", 1, 0, 160),))


def engine(name: str, load: int = 0) -> ScriptedEngine:
    made = ScriptedEngine(name, Script())
    made.work.load_tokens = load
    return made


def make(allocation: Allocation = TWO) -> tuple[ServingFleet, FirstInstance]:
    policy = FirstInstance()
    return ServingFleet(policy, allocation), policy


def test_the_view_is_of_now() -> None:
    fleet, _ = make()
    short, long = engine("s", load=5), engine("l")
    fleet.add(instance(short, "short", 60))
    fleet.add(instance(long, "long", 200))
    assert fleet.view(16, 0) == View(
        (InstanceView("s", 0, 60, 5), InstanceView("l", 1, 200, 0)), limits=(40, 160), turn_tokens=16
    )
    long.work.load_tokens = 70
    assert fleet.view(9, 0).instances[1].load_tokens == 70
    assert fleet.view(9, 0).turn_tokens == 9
    assert fleet.handle("l") is long
    assert fleet.allocation is TWO


def test_an_engine_whose_shape_has_no_bucket_is_left_out_until_it_has_one() -> None:
    fleet, _ = make(ONE)
    fleet.add(instance(engine("s"), "short", 60))
    fleet.add(instance(engine("l"), "long", 200))
    assert [seen.id for seen in fleet.view(16, 0).instances] == ["l"]
    assert [entry.handle.name for entry in fleet.instances()] == ["s", "l"]
    fleet.reallocate(TWO)
    assert [(seen.id, seen.bucket) for seen in fleet.view(16, 0).instances] == [("s", 0), ("l", 1)]
    assert fleet.view(16, 0).limits == (40, 160)


def test_an_engine_with_older_weights_than_a_turn_may_have_is_left_out_until_it_has_later_ones() -> None:
    fleet, _ = make()
    old, new = engine("s"), engine("l")
    old.version, new.version = 3, 5
    fleet.add(instance(old, "short", 60))
    fleet.add(instance(new, "long", 200))
    seen = {version: [it.id for it in fleet.view(16, version).instances] for version in (2, 3, 4, 5, 6)}
    assert seen == {2: ["s", "l"], 3: ["s", "l"], 4: ["l"], 5: ["l"], 6: []}
    old.version = 6
    assert [it.id for it in fleet.view(16, 6).instances] == ["s"]


def test_an_engine_that_leaves_takes_its_prefixes_with_it() -> None:
    fleet, policy = make()
    entry = instance(engine("s"), "short", 60)
    fleet.add(entry)
    assert fleet.remove("s") is entry
    assert fleet.remove("s") is None
    assert policy.gone == ["s"]
    assert fleet.view(16, 0).instances == ()


def test_another_engine_of_the_same_name_is_not_the_one_that_was_asked_for() -> None:
    fleet, _ = make()
    first, second = instance(engine("s"), "short", 60), instance(engine("s"), "short", 60)
    fleet.add(first)
    assert fleet.serves(first.handle)
    fleet.remove("s")
    assert not fleet.serves(first.handle)
    fleet.add(second)
    assert (fleet.serves(first.handle), fleet.serves(second.handle)) == (False, True)


CHANGES: dict[str, Callable[[ServingFleet], object]] = {
    "an engine comes": lambda fleet: fleet.add(instance(engine("new"), "short")),
    "an engine goes": lambda fleet: fleet.remove("s"),
    "later weights": lambda fleet: fleet.renewed(),
    "other buckets": lambda fleet: fleet.reallocate(ONE),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_every_change_wakes_all_who_wait(change: Callable[[ServingFleet], object]) -> None:
    fleet, _ = make()
    fleet.add(instance(engine("s"), "short"))
    waiting = [asyncio.create_task(fleet.changed()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    change(fleet)
    await asyncio.wait_for(asyncio.gather(*waiting), 20)


async def test_only_the_next_change_wakes() -> None:
    fleet, _ = make()
    fleet.add(instance(engine("s"), "short"))
    waiting = asyncio.create_task(fleet.changed())  # begins after the change
    for _ in range(5):
        await asyncio.sleep(0)
    fleet.remove("unknown")  # changes nothing
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    fleet.remove("s")
    await asyncio.wait_for(waiting, 20)


def test_a_lent_engine_is_in_the_view_while_its_device_is_lent_and_its_weights_are_new() -> None:
    fleet, _ = make()
    own, borrowed = engine("s"), engine("b")
    own.version, borrowed.lent = 2, True
    fleet.add(instance(own, "short", 60))
    fleet.add(instance(borrowed, "short", 60))

    def seen(seeded: bool = False) -> list[str]:
        return [it.id for it in fleet.view(16, 2, seeded).instances]

    borrowed.version = 1
    assert seen() == ["s"]
    borrowed.version = 2
    assert seen() == ["s", "b"] and seen(seeded=True) == ["s"]
    borrowed.away = "4 requests/s, lent up to 3"
    assert seen() == ["s"]
