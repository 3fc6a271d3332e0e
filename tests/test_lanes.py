"""Who is made beside whom."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from lanes import PROCESSES, turn

ROOT = Path(__file__).parents[1]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    door, room = tmp_path / "door", tmp_path / "room"
    door.touch()
    room.touch()
    return door, room


def be_alone(files: tuple[Path, Path]) -> threading.Event:
    """Set when somebody has been alone there; a thread, as locks are of open files and not of processes."""
    done = threading.Event()

    def wait() -> None:
        with turn(True, *files):
            done.set()

    threading.Thread(target=wait, daemon=True).start()
    return done


def test_the_lane_of_processes_is_of_files_that_exist() -> None:
    assert all((ROOT / path).exists() for path in PROCESSES)


def test_two_are_beside_each_other_and_nobody_beside_who_is_alone(files: tuple[Path, Path]) -> None:
    with turn(False, *files), turn(False, *files):
        done = be_alone(files)
        assert not done.wait(0.1)
    assert done.wait(20)


def test_who_wants_to_be_alone_is_let_in_though_others_keep_coming(files: tuple[Path, Path]) -> None:
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            with turn(False, *files):
                over.wait(0.05)

    others = [threading.Thread(target=come_and_go) for _ in range(10)]
    for other in others:
        other.start()
    try:
        assert be_alone(files).wait(10)
    finally:
        over.set()
        for other in others:
            other.join()
