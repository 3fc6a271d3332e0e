"""What becomes of a run whose disk is full.

Invariant: a file that could not be written is named, with what to do about it; the error of the operating system names
none.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free some space on its disk",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


class DiskError(RuntimeError):
    """A file of a run cannot be written. The message names it and the remedy."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = _REMEDIES.get(error.errno or 0, "free some space on its disk, or make it writable")
        super().__init__(f"{path} cannot be written ({error.strerror or error}): {remedy}")


def write_whole(path: Path, text: str | bytes) -> None:
    """Write or replace a file: whatever happens, it is what it was or what it is to be. On disk when this returns.
    Raises `DiskError`."""
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        try:
            with open(part, "wb") as file:
                file.write(text.encode() if isinstance(text, str) else text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)  # it takes space that somebody may need now
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the `OSError` of a write to `path` into `DiskError`."""
    try:
        yield
    except OSError as error:
        raise DiskError(path, error) from None
