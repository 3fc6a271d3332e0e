"""What a journal adds up to, entry by entry."""

from __future__ import annotations

import pytest

from libra.exec.journal import (
    AnyEntry,
    CheckpointWritten,
    MoveBegun,
    MoveDone,
    MoveFailed,
    MoveUndone,
    ProcessStarted,
    RunEnded,
    SessionStarted,
    TransitionBegun,
    TransitionDone,
    TransitionDropped,
    WeightsPublished,
    WorkerLost,
    replay,
)
from libra.plan.allocation import Allocation, Bucket
from libra.plan.transition import IDLE, TRAIN, Duty, Move, Role

SHORT, LONG = Duty(Role.ROLLOUT, "short"), Duty(Role.ROLLOUT, "long")
FIRST = Allocation(1, (Bucket("short", 1, 0, 40), Bucket("long", 1, 40, 160)))
SECOND = Allocation(2, (Bucket("long", 1, 0, 160),))
BEGUN: list[AnyEntry] = [
    SessionStarted(0),
    TransitionBegun(FIRST, None),
    *(MoveBegun(worker, IDLE, duty) for worker, duty in (("core-0", TRAIN), ("hybrid-0", SHORT), ("rollout-0", LONG))),
    *(MoveDone(worker, 1.0) for worker in ("core-0", "hybrid-0", "rollout-0")),
    TransitionDone(),
]
BEGUN_DUTIES = {"core-0": TRAIN, "hybrid-0": SHORT, "rollout-0": LONG}
PLANNED = [TransitionBegun(SECOND, FIRST), MoveBegun("hybrid-0", SHORT, TRAIN)]
MOVE = Move("hybrid-0", SHORT, TRAIN)
ROLES = [
    ("begun", [], {}, None, (FIRST,)),
    ("a move is under way", PLANNED, {}, MOVE, (SECOND, FIRST)),
    ("it is done", [*PLANNED, MoveDone("hybrid-0", 2.0)], {"hybrid-0": TRAIN}, None, (SECOND, FIRST)),
    ("and all is", [*PLANNED, MoveDone("hybrid-0", 2.0), TransitionDone()], {"hybrid-0": TRAIN}, None, (SECOND,)),
    ("it is undone", [*PLANNED, MoveUndone("hybrid-0", 2.0, "?"), TransitionDropped("?")], {}, None, (SECOND, FIRST)),
    ("it failed", [*PLANNED, MoveFailed("hybrid-0", 2.0, "?", False)], {"hybrid-0": IDLE}, None, (SECOND, FIRST)),
    (
        "for good",
        [*PLANNED, MoveFailed("hybrid-0", 2.0, "?", True)],
        {"hybrid-0": Duty(Role.FAILED)},
        None,
        (SECOND, FIRST),
    ),
    ("another is lost", [*PLANNED, WorkerLost("rollout-0", "?", False)], {"rollout-0": IDLE}, MOVE, (SECOND, FIRST)),
    ("what does not matter", [ProcessStarted("rollout-0", 1), CheckpointWritten(3), RunEnded(8)], {}, None, (FIRST,)),
]


@pytest.mark.parametrize(
    ("entries", "changed", "under_way", "plans"), [row[1:] for row in ROLES], ids=[row[0] for row in ROLES]
)
def test_roles_moves_and_plans(
    entries: list[AnyEntry], changed: dict[str, Duty], under_way: Move | None, plans: tuple[Allocation, ...]
) -> None:
    found = replay([*BEGUN, *entries])
    assert found.duties == BEGUN_DUTIES | changed
    assert dict(found.under_way) == ({} if under_way is None else {under_way.worker: under_way})
    assert found.plans == plans


def test_versions() -> None:
    assert replay([]).version == 0
    assert replay([*BEGUN, WeightsPublished(1), WeightsPublished(2)]).version == 2
    resumed = SessionStarted(1)  # from its checkpoint
    assert replay([*BEGUN, WeightsPublished(1), WeightsPublished(2), resumed]).version == 1


def test_a_new_session_begins_with_nothing_and_remembers_what_was() -> None:
    found = replay([*BEGUN, *PLANNED, MoveDone("hybrid-0", 2.0), WorkerLost("rollout-0", "?", True), SessionStarted(4)])
    assert (found.duties, dict(found.under_way)) == ({}, {})
    assert found.worked == {"core-0": TRAIN, "hybrid-0": TRAIN, "rollout-0": LONG}
    assert found.plans == (SECOND, FIRST)
