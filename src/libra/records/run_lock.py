"""The lock file of a run directory, and the process that holds it.

Invariant: a live run is told from one that ended by the lock itself, which the system releases with the process; the
process id in the file only names the holder.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK = "lock"  # the file's name; it holds the process id, stays when the run ends, and means nothing then


def running_process(directory: Path) -> str | None:
    """Id of the process that runs in this directory, or "unknown"; None where no process does."""
    path = directory / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return path.read_text(errors="replace").strip() or "unknown"
    finally:
        os.close(descriptor)
    return None
