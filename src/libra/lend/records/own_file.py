"""Files that only their owner may open.

Invariant: an opened file is a regular file with one name. The user of this process owns the file, and no other user may
read or write it. No link is followed. So a file that another user prepared in a shared directory is never used.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


class StrangerError(PermissionError):
    """A file that another user made, or can open. The message is one line with the remedy."""


def open_own(path: Path, *, create: bool) -> int:
    """Open a file for reading and writing; with `create`, make it if it does not exist. Raises `OSError`, and
    `StrangerError` if others have access to the file."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        if not create:
            raise
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _require_own(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_own(path: Path, found: os.stat_result) -> None:
    why = ""
    if not stat.S_ISREG(found.st_mode):
        why = "it is not a regular file"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to user {found.st_uid}"
    elif found.st_mode & 0o077:
        why = f"other users may open it (mode {stat.S_IMODE(found.st_mode):04o})"
    elif found.st_nlink != 1:
        why = f"it has {found.st_nlink} names"
    if why:
        raise StrangerError(0, f"{why}; use a file in a directory of your own (mode 0700)", str(path))
