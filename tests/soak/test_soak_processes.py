"""What a soak says is left behind."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.oracles import shared_memory
from tests.oracles.shared_memory import shared_files, unused_shared_files


def test_shared_memory_that_nobody_maps_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_TRACKER_SECONDS", 0.0)
    before = shared_files()
    left, used = (Path("/dev/shm") / f"libra-{os.getpid()}-{name}" for name in ("left", "used"))
    try:
        for file in (left, used):
            file.write_bytes(b"libra")
        with open(used, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            found = unused_shared_files(before)
        assert left.name in found and used.name not in found
    finally:
        left.unlink()
        used.unlink()


def test_shared_memory_that_its_owner_takes_away_meanwhile_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_TRACKER_SECONDS", 0.0)
    looks = iter([{"left-behind", "taken-away"}, {"left-behind"}])
    monkeypatch.setattr(shared_memory, "shared_files", lambda: next(looks))
    assert unused_shared_files(set()) == ["left-behind"]


def test_shared_memory_that_is_taken_away_after_its_owner_has_ended_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{"of-the-dead"}, {"of-the-dead"}, set[str]()])
    monkeypatch.setattr(shared_memory, "shared_files", lambda: next(looks))
    assert unused_shared_files(set()) == []
