"""The lock file of a run directory, and the process that holds it.

Invariant: a live run is told from one that ended by the lock itself, which the system releases with the process; the
process id in the file only names the holder.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from libra.config.input_file import open_input

LOCK = "lock"  # the file's name; it holds the process id, stays when the run ends, and means nothing then


def running_process(directory: Path) -> str | None:
    """Id of the process that runs in this directory, or "unknown"; None where no process does."""
    try:
        with open_input(directory / LOCK) as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().decode(errors="replace").strip() or "unknown"
    except OSError:
        pass
    return None
