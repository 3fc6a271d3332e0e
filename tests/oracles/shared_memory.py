"""Files in shared memory that processes have left behind."""

from __future__ import annotations

import time
from pathlib import Path

_TRACKER_SECONDS = 5.0  # a resource tracker takes away what its killed process named


def shared_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def unused_shared_files(before: set[str]) -> list[str]:
    """New files in shared memory that no process maps: their makers have left them behind. Those of a process that
    has just ended are taken away by its resource tracker a moment later."""
    ends = time.monotonic() + _TRACKER_SECONDS
    while (left := _unmapped(shared_files() - before)) and time.monotonic() < ends:
        time.sleep(0.1)
    return sorted(left)


def _unmapped(names: set[str]) -> set[str]:
    if not names:
        return names
    mapped = ""
    for entry in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped += entry.read_text()
        except OSError:
            pass  # it ended meanwhile
    there = names & shared_files()  # its owner may have taken it away, and ended, while we looked
    return {name for name in there if f"/dev/shm/{name}" not in mapped}
