"""Sharing of the machine by tests that run at once (`pytest -n 3`).

Invariant: tests that run whole engines, trainers or replicas in processes are made one after the other, so that each
has the machine to itself but for the tests without them; and beside a test marked `alone` there is no other.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

# The longest lane, so it is begun first.
PROCESSES = (
    "tests/integration/",
    "tests/backends/grpo/test_replica_processes.py",
)
PATIENT = "tests/integration/test_gpu_benchmark.py"  # a command that has no time to keep, and takes minutes
LONG = ("tests/test_rooms.py", "tests/test_evaluation_systems.py")  # files of minutes, begun early


class Lanes(LoadScopeScheduling):
    """One worker is given `PROCESSES`, and then what is left; the others are given file after file."""

    def _split_scope(self, nodeid: str) -> str:
        processes = nodeid.startswith(PROCESSES) and not nodeid.startswith(PATIENT)
        return "processes" if processes else nodeid.partition("::")[0]


@contextmanager
def turn(alone: bool, door: Path, room: Path) -> Iterator[None]:
    """The time of one test, among those of all processes that give the same two files, which are only locked."""
    with open(door) as entering, open(room) as inside:
        # Who wants to be alone keeps the door shut while the others leave: they would come in again for ever.
        fcntl.flock(entering, fcntl.LOCK_EX)
        fcntl.flock(inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(entering, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(inside, fcntl.LOCK_UN)  # closing is not enough: a fork of this process may have it open
