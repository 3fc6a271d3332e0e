"""The lock file of a run directory, and the process that holds it.

Invariant: only the lock says whether the run is alive, since the system releases it when the process ends. The process
id in the file only names the holder.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from libra.config.input_file import open_input

LOCK = "lock"  # name of the file with the process id; after the run ends, the file stays without meaning


def running_process(directory: Path) -> str | None:
    """Id of the process that runs in this directory, or "unknown"; None if no process does."""
    try:
        with open_input(directory / LOCK) as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().decode(errors="replace").strip() or "unknown"
    except OSError:
        pass
    return None
