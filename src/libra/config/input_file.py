"""Reading of input files.

Invariant: only a regular file is opened. Reading a FIFO could block for ever, and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

MOST = 2**53  # largest whole number in a file: floats are exact up to this number


def beyond_floats(found: object) -> bool:
    """Whether `found`, or a value nested in it, is a whole number beyond `MOST`. Arithmetic with such numbers may
    overflow.
    """
    if isinstance(found, int):
        return abs(found) > MOST
    if isinstance(found, list | tuple):
        return any(map(beyond_floats, found))
    return isinstance(found, dict) and any(map(beyond_floats, found.values()))


def open_input(path: Path | str) -> IO[bytes]:
    """Open a regular file for reading. Raises `OSError`, also when `path` is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_input(path: Path | str) -> bytes:
    """The content of a regular file. Raises `OSError`."""
    with open_input(path) as file:
        return file.read()
