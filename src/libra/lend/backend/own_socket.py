"""Unix sockets between processes of one user.

Invariant: the file of a socket has mode 0600 from the moment it exists, and each end checks the user at the other.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end


def bind_own(path: Path) -> socket.socket:
    """A socket bound to `path`, which must be free. Raises `OSError`."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(bound.fileno(), 0o600)  # before there is a file: no other user can connect in between
        bound.bind(str(path))
    except BaseException:
        bound.close()
        raise
    return bound


def trusted_peer(connection: socket.socket) -> int:
    """The process at the other end. Raises `PermissionError` if it belongs to another user, and not to root."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(said)
    if user not in (os.geteuid(), 0):
        raise PermissionError(0, f"the process at the other end of the socket belongs to user {user}")
    return int(process)
