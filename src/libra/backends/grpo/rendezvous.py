"""A small store with a secret, in which replicas exchange the addresses at which they connect.

Invariant: data that arrives before the secret is not kept, and data that arrives after it stays within the limits
below. A stranger can neither read nor set a key, and no message ends a process.

torch's own store has no authentication, lets every client list and set its keys, and ends its process on a malformed
frame. This store has the same interface, so gloo accepts either.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from threading import Condition, Thread

import msgspec
from torch.distributed import Store

_LONGEST_KEY, _LONGEST_VALUE = 512, 1 << 16  # bytes
_MOST_KEYS = 100_000  # above it the oldest keys are dropped, which are those of ended memberships
_MOST_GREETING = 32  # connections without the secret; above it the longest waiting one is closed
_GREETING_SECONDS = 5.0  # in which a connection must send the secret
_LOOK_SECONDS = 1.0  # between two searches for connections that are late with the secret
_HEAD = struct.Struct("!I")
_LARGEST_FRAME = _LONGEST_KEY + _LONGEST_VALUE + 64


class _Call(msgspec.Struct, frozen=True, array_like=True):
    """A call that sets `key` if there is a value; otherwise it waits up to `seconds` for the value of `key`."""

    key: str
    seconds: float
    value: bytes | None = None


class _Door:
    """New connections of a listener. One thread reads them until they have sent the secret, so a stranger costs a file
    descriptor and no thread, however slowly it sends."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        listener.setblocking(False)
        self._listener, self._secret = listener, secret.encode()
        self._shown: dict[socket.socket, bytearray] = {}  # bytes received from each; longest waiting first
        self._ends: dict[socket.socket, float] = {}  # deadline of each, on the monotonic clock
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def admitted(self) -> Iterator[socket.socket]:
        """Yield blocking connections that have sent the secret, until the listener is closed."""
        while self._listener.fileno() >= 0:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                connection: socket.socket | None = key.data
                if connection is None:
                    self._accept()
                elif connection in self._shown and self._has_shown(connection):
                    connection.setblocking(True)
                    yield connection
            for late in [it for it, ends in self._ends.items() if ends < time.monotonic()]:
                self._leave(late).close()
        for connection in list(self._shown):
            self._leave(connection).close()
        self._selector.close()

    def _accept(self) -> None:
        """Accept a connection that must send the secret. If too many wait, close the one that waits longest."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            time.sleep(0.1)  # too many files are open; the connection can be accepted later
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, connection)
        self._shown[connection] = bytearray()
        self._ends[connection] = time.monotonic() + _GREETING_SECONDS
        if len(self._shown) > _MOST_GREETING:
            self._leave(next(iter(self._shown))).close()

    def _has_shown(self, connection: socket.socket) -> bool:
        """Whether the connection has sent the whole secret. Closes a connection that sent something else or has
        ended."""
        shown = self._shown[connection]
        try:
            got = connection.recv(len(self._secret) - len(shown))
        except BlockingIOError:
            return False
        except OSError:
            got = b""
        shown += got
        if got and len(shown) < len(self._secret):
            return False
        self._leave(connection)
        if hmac.compare_digest(bytes(shown), self._secret):
            return True
        connection.close()
        return False

    def _leave(self, connection: socket.socket) -> socket.socket:
        del self._shown[connection], self._ends[connection]
        self._selector.unregister(connection)
        return connection


class RendezvousServer:
    """The store, in the process of the first replica. Daemon threads serve it: one for new connections, and one for
    each connection that has sent the secret."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        """Port 0 means any free port. Raises `OSError`."""
        self.host, self.secret = host, secret
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, bytes] = {}
        self._changed = Condition()
        Thread(target=self._listen, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        for connection in _Door(self._listener, self.secret).admitted():
            Thread(target=self._serve, args=(connection,), name="rendezvous replica", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            while True:
                call = msgspec.msgpack.decode(_receive(connection), type=_Call)
                _send(connection, self._answer(call))

    def _answer(self, call: _Call) -> bytes | None:
        """The value; None if it is not set in time, or exceeds a limit."""
        with self._changed:
            if call.value is not None:
                if len(call.key) > _LONGEST_KEY or len(call.value) > _LONGEST_VALUE:
                    return None
                self._values[call.key] = call.value
                if len(self._values) > _MOST_KEYS:
                    del self._values[next(iter(self._values))]
                self._changed.notify_all()
                return b""
            self._changed.wait_for(lambda: call.key in self._values, min(max(call.seconds, 0.0), 3600.0))
            return self._values.get(call.key)


class RendezvousStore(Store):
    """One replica's view of the store: its keys begin with `prefix`. Raises `OSError` if the store cannot be reached.

    gloo sets a key once per membership, so a value that this replica has set or seen is not requested again.
    """

    def __init__(self, host: str, port: int, secret: str, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._prefix, self._timeout = prefix, timeout
        self._known: dict[str, bytes] = {}
        try:
            self._connection = socket.create_connection((host, port), timeout.total_seconds())
        except OSError as error:
            raise ConnectionError(f"no replica listens at {host}:{port} ({error.strerror or error})") from None
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(secret.encode())

    def close(self) -> None:
        self._connection.close()

    def set(self, key: str, value: str | bytes) -> None:
        sent = value.encode() if isinstance(value, str) else bytes(value)
        if self._call(key, 0.0, sent) is None:
            raise ConnectionError(f"the rendezvous has no room for {key}")
        self._known[key] = sent

    def get(self, key: str) -> bytes:
        return self._value(key, self._timeout.total_seconds())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        ends = time.monotonic() + (timeout or self._timeout).total_seconds()
        for key in keys:
            self._value(key, ends - time.monotonic())

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._known or self._call(key, 0.0) is not None for key in keys)

    def _value(self, key: str, seconds: float) -> bytes:
        """The value, once a replica has set it. Raises `TimeoutError` after `seconds`."""
        if key not in self._known:
            found = self._call(key, seconds)
            if found is None:
                raise TimeoutError(f"no replica has set {key} within {seconds:.0f} s")
            self._known[key] = found
        return self._known[key]

    def _call(self, key: str, seconds: float, value: bytes | None = None) -> bytes | None:
        self._connection.settimeout(seconds + self._timeout.total_seconds())
        _send(self._connection, _Call(self._prefix + key, seconds, value))
        return msgspec.msgpack.decode(_receive(self._connection), type=bytes | None)


def _send(connection: socket.socket, message: _Call | bytes | None) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(_HEAD.pack(len(body)) + body)


def _receive(connection: socket.socket) -> bytes:
    (count,) = _HEAD.unpack(_read(connection, _HEAD.size))
    if count > _LARGEST_FRAME:
        raise ConnectionAbortedError(f"a frame of {count} bytes")
    return _read(connection, count)


def _read(connection: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes. Raises `OSError`."""
    room = bytearray(count)
    view = memoryview(room)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionResetError("the other end closed the connection")
        view = view[got:]
    return bytes(room)
