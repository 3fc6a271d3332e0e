"""A small store with a secret, in which replicas exchange the addresses at which they connect.

Invariant: nothing that arrives before a connection has shown the secret is kept or grows, and nothing that arrives
afterwards exceeds the limits below. A stranger can neither read nor set a key, and no message ends a process.

torch's own store has no authentication, lets every client list and set its keys, and ends its process on a malformed
frame. This one has the same interface, so that gloo takes either.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from threading import Condition, Lock, Thread

import msgspec
from torch.distributed import Store

_LONGEST_KEY, _LONGEST_VALUE = 512, 1 << 16  # bytes
_MOST_KEYS = 100_000  # the oldest go: they are of memberships that are over
_MOST_GREETING = 32  # connections that have not shown the secret yet; the longest waiting gives way to another one
_GREETING_SECONDS = 5.0  # for a connection to show the secret
_HEAD = struct.Struct("!I")
_LARGEST_FRAME = _LONGEST_KEY + _LONGEST_VALUE + 64


class _Call(msgspec.Struct, frozen=True, array_like=True):
    """Set `key` where there is a value; else wait up to `seconds` for the value of `key`."""

    key: str
    seconds: float
    value: bytes | None = None


class RendezvousServer:
    """The store, in the process of the first replica, served by daemon threads."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        """Port 0: any free one. Raises `OSError`."""
        self.host, self.secret = host, secret
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, bytes] = {}
        self._changed = Condition()
        self._greeting: dict[socket.socket, None] = {}  # longest waiting first
        self._door = Lock()  # of `_greeting`
        Thread(target=self._listen, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Refuse further connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too many files are open; waiting connections are still there later
                continue
            self._make_room(connection)
            Thread(target=self._serve, args=(connection,), name="rendezvous visitor", daemon=True).start()

    def _make_room(self, connection: socket.socket) -> None:
        """Add a connection that has to greet; where there are too many, the first ends, and its thread with it."""
        with self._door:
            self._greeting[connection] = None
            if len(self._greeting) > _MOST_GREETING:
                longest = next(iter(self._greeting))
                del self._greeting[longest]
                with contextlib.suppress(OSError):
                    longest.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, msgspec.MsgspecError, RecursionError):
            try:
                connection.settimeout(_GREETING_SECONDS)
                known = hmac.compare_digest(_read(connection, len(self.secret)), self.secret.encode())
            finally:
                with self._door:
                    self._greeting.pop(connection, None)
            connection.settimeout(None)
            while known:
                call = msgspec.msgpack.decode(_receive(connection), type=_Call)
                _send(connection, self._answer(call))

    def _answer(self, call: _Call) -> bytes | None:
        """The value; None where it does not arrive in time, or there is no room for it."""
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
    """One replica's view of the store: its keys begin with `prefix`. Raises `OSError` where it cannot be reached."""

    def __init__(self, host: str, port: int, secret: str, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        self._prefix, self._timeout = prefix, timeout
        try:
            self._connection = socket.create_connection((host, port), timeout.total_seconds())
        except OSError as error:
            raise ConnectionError(f"no replica listens at {host}:{port} ({error.strerror or error})") from None
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(secret.encode())

    def close(self) -> None:
        self._connection.close()

    def set(self, key: str, value: str | bytes) -> None:
        if self._call(key, 0.0, value.encode() if isinstance(value, str) else bytes(value)) is None:
            raise ConnectionError(f"the rendezvous has no room for {key}")

    def get(self, key: str) -> bytes:
        found = self._call(key, self._timeout.total_seconds())
        if found is None:
            raise TimeoutError(f"no replica has said {key} in {self._timeout.total_seconds():.0f} s")
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        ends = time.monotonic() + (timeout or self._timeout).total_seconds()
        for key in keys:
            if self._call(key, ends - time.monotonic()) is None:
                raise TimeoutError(f"no replica has said {key} in time")

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._call(key, 0.0) is not None for key in keys)

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
    """Exactly `count` bytes. Raises `OSError`."""
    room = bytearray(count)
    view = memoryview(room)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionResetError("the other end closed the connection")
        view = view[got:]
    return bytes(room)
