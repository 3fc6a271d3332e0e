"""The lock file of a run directory, and the process that holds it.

Invariant: the lock itself tells a live run from one that ended, since the system releases it with the process; the
process id in the file only names the holder.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from libra.config.input_file import open_input

LOCK = "lock"  # name of the file, which holds the process id; it stays, without meaning, when the run ends


def running_process(directory: Path) -> str | None:
    """Id of the process that runs in this directory, or "unknown"; None if there is none."""
    try:
        with open_input(directory / LOCK) as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().decode(errors="replace").strip() or "unknown"
    except OSError:
        pass
    return None
