"""A plan as a transaction: what is done, what is undone, what the journal and the watchers hear of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from fakes.world import FIRST, LONGEST, World

from libra.exec.journal import (
    MoveBegun,
    MoveDone,
    MoveFailed,
    MoveUndone,
    TransitionBegun,
    TransitionDone,
    TransitionDropped,
    WorkerLost,
    read_journal,
)
from libra.exec.pool import LOSS_WINDOW, MOST_LOSSES
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.plan.allocation import Allocation, Bucket
from libra.plan.transition import IDLE, TRAIN, Duty, Move, Role

# FIRST: hybrid-0 trains, hybrid-1 is the long engine, both rollouts are short ones.
SHORT, LONG = Duty(Role.ROLLOUT, "short"), Duty(Role.ROLLOUT, "long")
LONGER = Allocation(1, (Bucket("short", 1, 0, 40), Bucket("long", 3, 40, LONGEST)))
BEGUN = {"core-0": TRAIN, "hybrid-0": TRAIN, "hybrid-1": LONG, "rollout-0": SHORT, "rollout-1": SHORT}
OUT_OF_MEMORY = WorkerFailedError("worker hybrid-0: out of memory")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    made = World(tmp_path, steps=2)
    made.told.moves.clear()
    yield made
    made.close()
    made.loop.close()


def duties(world: World) -> dict[str, Duty]:
    return {worker.id: worker.duty for worker in world.pool.all()}


def apply(world: World, wanted: Allocation) -> None:
    world.applying = world.loop.create_task(world.apply(wanted))
    world.settle()


def go_on(world: World, *names: str) -> None:
    """These points are passed, one after the other."""
    for name in names:
        assert [point.name for point in world.slots.points.values()] == [name]
        world.go_on(0)


ALL = ("drain", "stop", "fork", "import", "boundary")


def outcomes(world: World) -> list[str]:
    return [f"{moved.move.worker} {moved.move} {moved.outcome}" for moved in world.told.moves]


def journalled(world: World, *kinds: type) -> list[object]:
    return [entry for entry in read_journal(world.directory / "journal.jsonl") if isinstance(entry, kinds)]


def test_the_first_allocation(world: World) -> None:
    assert duties(world) == BEGUN
    assert world.executor.allocation() == FIRST
    assert journalled(world, TransitionBegun, TransitionDone) == [TransitionBegun(FIRST, None), TransitionDone()]


def test_moves_are_made_one_after_the_other(world: World) -> None:
    apply(world, LONGER)
    assert world.pool["hybrid-0"].role is Role.DRAINING
    go_on(world, "drain", "stop")
    assert world.pool["hybrid-0"].role is Role.JOINING
    world.clock = 7.5
    go_on(world, "fork", "import", "boundary")
    assert duties(world) == BEGUN | {"hybrid-0": LONG, "rollout-1": Duty(Role.DRAINING)}
    go_on(world, *ALL)
    assert duties(world) == BEGUN | {"hybrid-0": LONG, "rollout-1": LONG}
    assert outcomes(world) == ["hybrid-0 train -> rollout:long done", "rollout-1 rollout:short -> rollout:long done"]
    assert [moved.seconds for moved in world.told.moves] == [7.5, 0.0]
    assert journalled(world, TransitionBegun, MoveBegun, MoveDone, TransitionDone)[-6:] == [
        TransitionBegun(LONGER, FIRST),
        MoveBegun("hybrid-0", TRAIN, LONG),
        MoveDone("hybrid-0", 7.5),
        MoveBegun("rollout-1", SHORT, LONG),
        MoveDone("rollout-1", 0.0),
        TransitionDone(),
    ]


def test_turns_are_routed_by_what_is_true_at_every_moment(world: World) -> None:
    def limits() -> list[tuple[str, int, int]]:
        return [(bucket.shape, bucket.engines, bucket.up_to) for bucket in world.fleet.allocation.buckets]

    apply(world, Allocation(1, (Bucket("middle", 3, 0, 70), Bucket("long", 1, 70, LONGEST))))
    assert limits() == [("short", 2, 40), ("long", 1, 100)]  # hybrid-0 leaves the training
    go_on(world, *ALL)
    assert limits() == [("short", 1, 40), ("middle", 1, 70), ("long", 1, 100)]  # and rollout-0 drains
    go_on(world, *ALL, *ALL)
    assert limits() == [("middle", 3, 70), ("long", 1, 100)]


@pytest.mark.parametrize(
    ("passed", "how"),
    [
        (passed, how)
        for passed, how in product(range(len(ALL)), ("fails", "dies", "hangs"))
        if (ALL[passed], how) != ("fork", "dies")  # there is no process between the old one and the new one
    ],
)
def test_a_move_that_fails_anywhere_is_undone_and_the_rest_is_dropped(world: World, passed: int, how: str) -> None:
    apply(world, LONGER)
    go_on(world, *ALL[:passed])
    match how:
        case "fails":
            world.fail(0, OUT_OF_MEMORY)
        case "dies":
            world.kill(sorted(set(world.slots.processes) - {"core-0"}).index("hybrid-0"))
        case "hangs":
            world.hang()
    go_on(world, "fork", "import", "boundary")  # its process starts again, as what it was
    assert duties(world) == BEGUN
    assert outcomes(world) == ["hybrid-0 train -> rollout:long undone"]
    assert not world.told.losses
    assert world.pool["hybrid-0"].losses == ()
    [undone] = journalled(world, MoveUndone)
    assert isinstance(undone, MoveUndone)
    assert {"fails": "out of memory", "dies": "signal 9", "hangs": "for more than"}[how] in undone.why
    assert journalled(world, TransitionDropped) == [
        TransitionDropped(f"hybrid-0 could not become rollout:long: {undone.why}")
    ]


def test_what_can_be_neither_done_nor_undone_leaves_an_idle_slot(world: World) -> None:
    apply(world, LONGER)
    go_on(world, "drain", "stop", "fork")
    world.fail(0, OUT_OF_MEMORY)
    go_on(world, "fork")
    world.fail(0, WorkerLostError("worker hybrid-0 went away"))
    assert duties(world) == BEGUN | {"hybrid-0": IDLE}
    assert outcomes(world) == ["hybrid-0 train -> rollout:long failed"]
    why = "worker hybrid-0: out of memory; then it could not become train again: worker hybrid-0 went away"
    assert journalled(world, MoveFailed) == [MoveFailed("hybrid-0", 0.0, why, retired=False)]
    assert world.executor.allocation() == Allocation(1, FIRST.buckets)  # what is true now
    # Planning starts again from there, and the slot is used.
    apply(world, FIRST)
    go_on(world, "fork", "import", "boundary")
    assert duties(world) == BEGUN


def test_a_slot_that_cannot_be_started_is_retired(world: World) -> None:
    world.kill(0)
    assert (world.told.losses, duties(world)) == ([("hybrid-0", "signal 9")], BEGUN | {"hybrid-0": IDLE})
    for number in range(MOST_LOSSES - 1):
        apply(world, FIRST)
        world.fail(0, OUT_OF_MEMORY)
        assert world.pool["hybrid-0"].retired == (number == MOST_LOSSES - 2)
    assert duties(world)["hybrid-0"] == Duty(Role.FAILED)
    assert [entry.retired for entry in journalled(world, WorkerLost, MoveFailed)] == [False, False, True]  # type: ignore[attr-defined]
    world.loop.run_until_complete(world.apply(Allocation(1, FIRST.buckets)))  # the others are all there is
    with pytest.raises(ValueError, match="3 engines are wanted, but 2 workers are left"):
        world.loop.run_until_complete(world.apply(FIRST))


def test_losses_long_ago_do_not_retire_a_slot(world: World) -> None:
    for _ in range(2 * MOST_LOSSES):
        world.kill(0)
        world.clock += LOSS_WINDOW / 2 + 1
        apply(world, FIRST)
        go_on(world, "fork", "import", "boundary")
    assert duties(world) == BEGUN


def test_a_plan_is_dropped_when_another_worker_is_lost(world: World) -> None:
    apply(world, LONGER)
    go_on(world, "drain")
    world.kill(sorted(set(world.slots.processes) - {"core-0"}).index("rollout-1"))
    go_on(world, *ALL[1:])
    assert duties(world) == BEGUN | {"hybrid-0": LONG, "rollout-1": IDLE}
    assert journalled(world, TransitionDropped) == [TransitionDropped("rollout-1 was lost meanwhile")]


def test_the_rest_of_a_plan_can_be_dropped(world: World) -> None:
    apply(world, LONGER)
    world.executor.drop_rest("the run is over")
    go_on(world, *ALL)
    assert duties(world) == BEGUN | {"hybrid-0": LONG}
    assert journalled(world, TransitionDropped) == [TransitionDropped("the run is over")]
    apply(world, LONGER)  # the next plan is another one
    go_on(world, *ALL)
    assert world.executor.allocation() == LONGER


@pytest.mark.parametrize(("error", "why"), [(OUT_OF_MEMORY, str(OUT_OF_MEMORY)), (TimeoutError(), "TimeoutError")])
def test_a_single_move_fails_with_its_own_error(world: World, error: Exception, why: str) -> None:
    moving = world.loop.create_task(world.executor.move(Move("rollout-0", SHORT, SHORT)))
    world.applying = moving  # type: ignore[assignment]
    with pytest.raises(type(error)):
        world.settle()
        go_on(world, "drain", "stop")
        world.fail(0, error)
    world.applying = None
    assert duties(world) == BEGUN | {"rollout-0": IDLE}
    assert journalled(world, MoveFailed) == [MoveFailed("rollout-0", 0.0, why, retired=False)]


def test_what_nobody_expected_is_not_caught(world: World) -> None:
    with pytest.raises(ZeroDivisionError):
        apply(world, LONGER)
        world.fail(0, ZeroDivisionError())
    world.applying = None
