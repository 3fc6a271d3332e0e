"""One controller at a time in a run directory.

Invariant: whoever writes or deletes anything in a run directory holds its lock. The system lets go of it when the
process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from libra.config.run import ConfigError
from libra.records.disk import writing

LOCK = "lock"  # the file's name; it stays when the run ends, and means nothing then


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory, which is made where there is none. Raises `ConfigError` where another process
    holds it, `DiskError` where the file cannot be made."""
    path = directory / LOCK
    with writing(path):
        directory.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with writing(path):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
                raise ConfigError(
                    f"name: process {owner} is running in {directory}; wait for it, stop it, or give another --name"
                ) from None
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(file)
