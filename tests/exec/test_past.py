"""What a journal adds up to, entry by entry."""

from __future__ import annotations

import pytest

from libra.exec.journal import (
    AnyEntry,
    Applied,
    Checkpoint,
    Done,
    Dropped,
    End,
    Failed,
    Intend,
    Lost,
    Plan,
    Process,
    Start,
    Step,
    Undone,
)
from libra.exec.moves import Move
from libra.exec.replay import past
from libra.exec.workers import IDLE, TRAIN, Duty, Role
from libra.plan.problem import Allocation, Bucket

SHORT, LONG = Duty(Role.ROLLOUT, "short"), Duty(Role.ROLLOUT, "long")
FIRST = Allocation(1, (Bucket("short", 1, 0, 40), Bucket("long", 1, 40, 160)))
SECOND = Allocation(2, (Bucket("long", 1, 0, 160),))
BEGUN: list[AnyEntry] = [
    Start(0),
    Plan(FIRST, None),
    *(Intend(worker, IDLE, duty) for worker, duty in (("core-0", TRAIN), ("hybrid-0", SHORT), ("rollout-0", LONG))),
    *(Done(worker, 1.0) for worker in ("core-0", "hybrid-0", "rollout-0")),
    Applied(),
]
BEGUN_DUTIES = {"core-0": TRAIN, "hybrid-0": SHORT, "rollout-0": LONG}
PLANNED = [Plan(SECOND, FIRST), Intend("hybrid-0", SHORT, TRAIN)]
MOVE = Move("hybrid-0", SHORT, TRAIN)
ROLES = [
    ("begun", [], {}, None, (FIRST,)),
    ("a move is under way", PLANNED, {}, MOVE, (SECOND, FIRST)),
    ("it is done", [*PLANNED, Done("hybrid-0", 2.0)], {"hybrid-0": TRAIN}, None, (SECOND, FIRST)),
    ("and all is", [*PLANNED, Done("hybrid-0", 2.0), Applied()], {"hybrid-0": TRAIN}, None, (SECOND,)),
    ("it is undone", [*PLANNED, Undone("hybrid-0", 2.0, "?"), Dropped("?")], {}, None, (SECOND, FIRST)),
    ("it failed", [*PLANNED, Failed("hybrid-0", 2.0, "?", False)], {"hybrid-0": IDLE}, None, (SECOND, FIRST)),
    (
        "for good",
        [*PLANNED, Failed("hybrid-0", 2.0, "?", True)],
        {"hybrid-0": Duty(Role.FAILED)},
        None,
        (SECOND, FIRST),
    ),
    ("another is lost", [*PLANNED, Lost("rollout-0", "?", False)], {"rollout-0": IDLE}, MOVE, (SECOND, FIRST)),
    ("what does not matter", [Process("rollout-0", 1), Checkpoint(3), End(8)], {}, None, (FIRST,)),
]


@pytest.mark.parametrize(
    ("entries", "changed", "under_way", "plans"), [row[1:] for row in ROLES], ids=[row[0] for row in ROLES]
)
def test_roles_moves_and_plans(
    entries: list[AnyEntry], changed: dict[str, Duty], under_way: Move | None, plans: tuple[Allocation, ...]
) -> None:
    found = past([*BEGUN, *entries])
    assert found.duties == BEGUN_DUTIES | changed
    assert dict(found.under_way) == ({} if under_way is None else {under_way.worker: under_way})
    assert found.plans == plans


def test_versions() -> None:
    assert past([]).version == 0
    assert past([*BEGUN, Step(1), Step(2)]).version == 2
    assert past([*BEGUN, Step(1), Step(2), Start(1)]).version == 1  # resumed from its checkpoint


def test_a_new_sitting_begins_with_nothing_and_remembers_what_was() -> None:
    found = past([*BEGUN, *PLANNED, Done("hybrid-0", 2.0), Lost("rollout-0", "?", True), Start(4)])
    assert (found.duties, dict(found.under_way)) == ({}, {})
    assert found.worked == {"core-0": TRAIN, "hybrid-0": TRAIN, "rollout-0": LONG}
    assert found.plans == (SECOND, FIRST)
