"""Unix sockets between processes of one user.

Invariant: the file of a socket always has mode 0600, and each end checks the user of the other end.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end


def bind_own(path: Path) -> socket.socket:
    """Bind a socket to `path`, which must not exist. Raises `OSError`."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(bound.fileno(), 0o600)  # before `bind` makes the file, so that no other user can connect in between
        bound.bind(str(path))
    except BaseException:
        bound.close()
        raise
    return bound


def trusted_peer(connection: socket.socket) -> int:
    """Process ID of the other end. Raises `PermissionError` if that process belongs to a user other than this one and
    root."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(said)
    if user not in (os.geteuid(), 0):
        raise PermissionError(0, f"the process at the other end of the socket belongs to user {user}")
    return int(process)
