"""Files in shared memory that processes have left behind."""

from __future__ import annotations

import time
from pathlib import Path

_TRACKER_SECONDS = 5.0  # time for a resource tracker to remove the files of its killed process


def shared_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def unused_shared_files(before: set[str]) -> list[str]:
    """New files in shared memory that no process maps, so that their makers have left them behind. The resource tracker
    of a process that has just ended removes its files a moment later, and gets time to do so."""
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
            pass  # the process has just ended
    there = names & shared_files()  # an owner may have removed its file and ended during the search
    return {name for name in there if f"/dev/shm/{name}" not in mapped}
