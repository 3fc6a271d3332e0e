"""What a restarted controller reads is what was committed, wherever the first one was cut off."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra.config.sealed_line import sealed
from libra.exec.journal import (
    AnyEntry,
    CheckpointWritten,
    Journal,
    JournalError,
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
    read_journal,
    replay,
)
from libra.plan.allocation import Allocation, Bucket
from libra.plan.transition import IDLE, TRAIN, Duty, Move, Role

ENTRIES: list[AnyEntry] = [
    SessionStarted(3),
    TransitionBegun(Allocation(2, (Bucket("short", 1, 0, 40), Bucket("long", 1, 40, 160))), None),
    MoveBegun("hybrid-0", IDLE, TRAIN),
    ProcessStarted("hybrid-0", 4711),
    MoveDone("hybrid-0", 2.5),
    TransitionDone(),
    WeightsPublished(4),
    CheckpointWritten(4),
    WorkerLost("rollout-1", 'process ended: "signal 9"\nZürich \u2028', retired=False),
    MoveBegun("rollout-1", IDLE, Duty(Role.ROLLOUT, "long")),
    MoveFailed("rollout-1", 120.0, "no answer", retired=True),
    MoveUndone("rollout-0", 12.0, "it went away"),
    TransitionDropped("rollout-1 could not become rollout:long"),
    RunEnded(8),
]


def chain(*lines: bytes) -> bytes:
    """Content of a journal that has these lines."""
    found = [b""]
    for line in lines:
        found.append(sealed(line, found[-1]))
    return b"\n".join([*found[1:], b""])


def written(path: Path, entries: list[AnyEntry]) -> None:
    journal = Journal(path)
    for entry in entries:
        journal.commit(entry)
    journal.close()


def test_round_trip(tmp_path: Path) -> None:
    assert {type(entry) for entry in ENTRIES} == set(AnyEntry.__args__)
    written(tmp_path / "journal.jsonl", ENTRIES)
    assert list(read_journal(tmp_path / "journal.jsonl")) == ENTRIES


def test_a_commit_is_on_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    journal.note(WeightsPublished(1))
    journal.commit(CheckpointWritten(1))
    lines = (b'{"kind":"step","version":1}', b'{"kind":"checkpoint","step":1}')
    assert synced == [chain(*lines)]
    journal.close()


WHOLE = chain(*map(msgspec.json.encode, ENTRIES))


@settings(max_examples=50, deadline=None)
@example(cut=WHOLE.index(b"\n"))  # only the line's end is missing
@example(cut=WHOLE.index(b"\n") + 1)
@given(cut=st.integers(0, len(WHOLE)))
def test_cut_anywhere_the_whole_lines_are_kept_and_more_can_be_written(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    path.write_bytes(WHOLE[:cut])
    kept = ENTRIES[: WHOLE[:cut].count(b"\n")]
    assert list(read_journal(path)) == kept
    written(path, [SessionStarted(7)])
    assert list(read_journal(path)) == [*kept, SessionStarted(7)]


@pytest.mark.parametrize(
    "damage",
    [
        b'{"kind": "do',
        b"",
        b"\0\0\0\0",
        b"\xff\xfe\x00",
        b'{"kind":"begin"}',
        b'{"kind":"step"}',
        b'{"kind":"step","version":1,"x":0}',
        b'{"kind":"intend","worker":"w","before":{"role":"idle","shape":"long"},"after":{"role":"idle"}}',
    ],
    ids=["cut off", "empty", "zeros", "not text", "unknown kind", "a field less", "a field more", "no such duty"],
)
def test_a_damaged_line_in_the_middle_is_an_error(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, second = map(msgspec.json.encode, ENTRIES[:2])
    path.write_bytes(chain(first, damage, second) if damage.endswith(b"}") else chain(first) + damage + b"\n")
    with pytest.raises(JournalError, match=r"journal\.jsonl:2: .* the journal is damaged"):
        list(read_journal(path))


def test_a_damaged_last_line_that_is_complete_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(sealed(b'{"kind":"applied"}') + b'\n{"kind":\n')
    with pytest.raises(JournalError, match=r"journal\.jsonl:2"):
        list(read_journal(path))


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, [WeightsPublished(4)])
    path.write_bytes(path.read_bytes().replace(b":4}", b":5}"))
    with pytest.raises(JournalError, match=r"journal\.jsonl:1: the line does not match its checksum"):
        list(read_journal(path))


@given(st.lists(st.integers(0, len(ENTRIES) - 1), min_size=1, max_size=len(ENTRIES)))
@example([0, 1, 3, 4])  # one is missing
@example([1, 2])  # the first one is
@example([0, 2, 1, 3])  # two changed places
@example([0, 1, 1, 2])  # one is there twice
def test_lines_that_do_not_follow_each_other_are_found(order: list[int]) -> None:
    lines = WHOLE.splitlines(keepends=True)
    follow = next((number for number, at in enumerate(order) if number != at), len(order))
    with TemporaryDirectory() as directory:
        path = Path(directory) / "journal.jsonl"
        path.write_bytes(b"".join(lines[at] for at in order))
        entries = read_journal(path)
        assert [next(entries) for _ in range(follow)] == ENTRIES[:follow]
        if follow == len(order):
            assert list(entries) == []
            return
        with pytest.raises(JournalError, match=rf"journal\.jsonl:{follow + 1}: the line does not match its checksum"):
            next(entries)


def test_a_move_that_never_began_is_refused() -> None:
    with pytest.raises(JournalError, match="a move of hybrid-0 ends without a beginning"):
        replay([MoveDone("hybrid-0", 1.0)])


def test_an_empty_journal(tmp_path: Path) -> None:
    written(tmp_path / "journal.jsonl", [])
    assert list(read_journal(tmp_path / "journal.jsonl")) == []


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
