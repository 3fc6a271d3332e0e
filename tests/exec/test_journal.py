"""What a restarted controller reads is what was committed, wherever the first one was cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libra.exec.journal import Journal, JournalError, read_journal

ENTRIES = [
    {"kind": "plan", "replicas": 2, "buckets": ["short"]},
    {"kind": "intend", "worker": "hybrid-0", "role": "train", "shape": None},
    {"kind": "lost", "worker": "rollout-1", "why": 'process ended: "signal 9"\nZürich \u2028'},
]


def written(path: Path, entries: list[dict[str, object]]) -> None:
    journal = Journal(path)
    for entry in entries:
        journal.commit(**entry)  # type: ignore[arg-type]
    journal.close()


def test_round_trip(tmp_path: Path) -> None:
    written(tmp_path / "journal.jsonl", ENTRIES)
    assert list(read_journal(tmp_path / "journal.jsonl")) == ENTRIES


def test_a_commit_is_in_the_file_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    journal.note("step", step=1)
    journal.commit("done", worker="w")
    assert synced == [b'{"kind": "step", "step": 1}\n{"kind": "done", "worker": "w"}\n']
    journal.close()


WHOLE = b"".join(json.dumps(entry).encode() + b"\n" for entry in ENTRIES)


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
    written(path, [{"kind": "resume"}])
    assert list(read_journal(path)) == [*kept, {"kind": "resume"}]


@pytest.mark.parametrize(
    "damage",
    [b'{"kind": "do', b"", b"\0\0\0\0", b"\xff\xfe\x00"],
    ids=["cut off", "empty", "zeros", "not text"],
)
def test_a_damaged_line_in_the_middle_is_an_error(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first, second, third = (json.dumps(entry).encode() for entry in ENTRIES)
    path.write_bytes(b"\n".join([first, damage, third, second]) + b"\n")
    with pytest.raises(JournalError, match=r"journal\.jsonl:2: .* the journal is damaged"):
        list(read_journal(path))


def test_a_damaged_last_line_that_is_complete_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "plan"}\n{"kind":\n')
    with pytest.raises(JournalError, match=r"journal\.jsonl:2"):
        list(read_journal(path))


def test_an_empty_journal(tmp_path: Path) -> None:
    written(tmp_path / "journal.jsonl", [])
    assert list(read_journal(tmp_path / "journal.jsonl")) == []
