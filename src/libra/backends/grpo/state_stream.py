"""How a core's state travels to another node: frames of fixed sizes on one TCP connection, vectors in pieces.

Invariant: a piece arrives as it was sent, which its checksum shows, or the connection is of no more use. Neither end
waits longer than `SILENT_SECONDS` for a frame or a piece that is due, nor keeps a copy of a vector.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from libra.backends.grpo.gradient_ring import Update
from libra.backends.grpo.publication import OverrunError, Shape, State, UnreachableError, overwritten
from libra.backends.transport.shared_vectors import LayoutError, Vector
from libra.backends.transport.trainer_messages import TOKEN_BYTES, RelayPlace

# A healthy peer sends a piece in milliseconds; a loaded machine may let it wait for seconds. The controller waits a
# little longer for a joiner (`Patience.floor`): it is to hear from it that its way to the core broke.
SILENT_SECONDS = 8.0

_PIECE_BYTES = 1 << 20
_GREETING = struct.Struct(f"!{TOKEN_BYTES}sq16sq")  # token, then the shape
_REQUEST = struct.Struct("!Bq")  # what, and for the update to which state
_VERDICT = struct.Struct("!B")
_STATE = struct.Struct("!qqqd")
_UPDATE = struct.Struct("!qddd")
_PIECE = struct.Struct("!II")  # bytes that follow and their CRC-32; no bytes: the vectors end here


class StateRequest(IntEnum):
    AT_REST, COPY_STATE, HAS_UPDATE, COPY_UPDATE = range(4)


class Verdict(IntEnum):
    NO, YES, OVERRUN, OTHER_SHAPE = range(4)


Known = TypeVar("Known", StateRequest, Verdict)


class StateStream:
    """One end. Every verb raises `OSError` when the other end is gone, silent or not understood."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # requests are small and waited for

    def close(self) -> None:
        self._connection.close()

    def greet(self, token: str, shape: Shape) -> None:
        self._send(_GREETING, token.encode(), shape.length, shape.dtype.encode(), shape.signature)

    def greeting(self, seconds: float) -> tuple[bytes, Shape]:
        """Token and shape of the other end, which has `seconds` to send them."""
        token, length, dtype, signature = self._receive(_GREETING, seconds)
        return token, Shape(length, dtype.rstrip(b"\0").decode(errors="replace"), signature)

    def ask(self, request: StateRequest, number: int = 0) -> None:
        self._send(_REQUEST, request, number)

    def asked(self, seconds: float) -> tuple[StateRequest, int]:
        """The next request, which may take `seconds` to come."""
        request, number = self._receive(_REQUEST, seconds)
        return _known(StateRequest, request), number

    def answer(self, verdict: Verdict) -> None:
        self._send(_VERDICT, verdict)

    def verdict(self, seconds: float | None = None) -> Verdict:
        return _known(Verdict, self._receive(_VERDICT, seconds)[0])

    def send_state(self, state: State) -> None:
        self._send(_STATE, state.number, state.checksum, state.steps, state.learning_rate)

    def state(self) -> State:
        return State(*self._receive(_STATE))

    def send_update(self, update: Update) -> None:
        self._send(_UPDATE, update.number, update.learning_rate, update.denominator, update.gradient_norm)

    def update(self) -> Update:
        return Update(*self._receive(_UPDATE))

    def send_vectors(self, vectors: Sequence[Vector], is_whole: Callable[[], bool]) -> None:
        """Send them as long as they are what they were at the beginning, and then whether they were so to the end."""
        for vector in vectors:
            data = vector.view(np.uint8).data
            for start in range(0, len(data), _PIECE_BYTES):
                if not is_whole():
                    break
                piece = _copy(data[start : start + _PIECE_BYTES])
                self._send(_PIECE, len(piece), zlib.crc32(piece))
                self._connection.sendall(piece)
        self._send(_PIECE, 0, 0)
        self.answer(Verdict.YES if is_whole() else Verdict.NO)

    def fill(self, vectors: Sequence[Vector]) -> bool:
        """Whether they hold what was published; where not, they hold parts of several."""
        rooms = [vector.view(np.uint8).data for vector in vectors]
        while True:
            count, checksum = self._receive(_PIECE)
            if count == 0:
                break
            if not rooms or count > len(rooms[0]):
                raise ConnectionAbortedError("more was sent than was asked for")
            self._fill(rooms[0][:count])
            if zlib.crc32(rooms[0][:count]) != checksum:
                raise ConnectionAbortedError("a piece arrived damaged")
            rooms[0] = rooms[0][count:]
            if not rooms[0]:
                del rooms[0]
        whole = self.verdict() is Verdict.YES
        if whole and rooms:
            raise ConnectionAbortedError("less was sent than was asked for")
        return whole

    def _send(self, layout: struct.Struct, *values: int | float | bytes) -> None:
        self._connection.settimeout(SILENT_SECONDS)
        self._connection.sendall(layout.pack(*values))

    def _receive(self, layout: struct.Struct, seconds: float | None = None) -> tuple[Any, ...]:
        frame = bytearray(layout.size)
        self._fill(memoryview(frame), seconds)
        return layout.unpack(frame)

    def _fill(self, room: memoryview, seconds: float | None = None) -> None:
        ends = time.monotonic() + (SILENT_SECONDS if seconds is None else seconds)
        while room:
            left = ends - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                self._connection.settimeout(left)
                count = self._connection.recv_into(room)
            except TimeoutError:
                raise TimeoutError("the other end is silent") from None
            if count == 0:
                raise ConnectionResetError("the other end closed the connection")
            room = room[count:]


def _known(kind: type[Known], value: int) -> Known:
    try:
        return kind(value)
    except ValueError:
        raise ConnectionAbortedError(f"{value} is no {kind.__name__}") from None


def _copy(data: memoryview) -> bytes:
    return bytes(data)


_STARTING_SECONDS = 30.0  # the relay's socket is there before its process has started


class RemotePublication:
    """The publication of a core on another node, through the relay beside it: what is read is whole or refused.

    Once the relay was silent, unclear or gone this end is closed for good. See `Publication`.
    """

    def __init__(self, place: RelayPlace, shape: Shape) -> None:
        """Raises `LayoutError`, and `OSError` when the relay is not there or does not take the token."""
        self._stream = StateStream(socket.create_connection((place.host, place.port), SILENT_SECONDS))
        weakref.finalize(self, self._stream.close)
        self._stream.greet(place.token, shape)
        if self._stream.verdict(_STARTING_SECONDS) is not Verdict.YES:
            raise LayoutError("the core publishes another model or precision: all replicas must train the same")

    def at_rest(self) -> bool:
        with self._reaching():
            self._stream.ask(StateRequest.AT_REST)
            return self._stream.verdict() is Verdict.YES

    def copy_state(self, into: Sequence[Vector]) -> State | None:
        with self._reaching():
            self._stream.ask(StateRequest.COPY_STATE)
            if self._stream.verdict() is not Verdict.YES:
                return None
            state = self._stream.state()
            return state if self._stream.fill(into) else None

    def has_update(self, number: int) -> bool:
        with self._reaching():
            self._stream.ask(StateRequest.HAS_UPDATE, number)
            verdict = self._stream.verdict()
        if verdict is Verdict.OVERRUN:
            raise OverrunError(f"the update to state {number} is gone")
        return verdict is Verdict.YES

    def copy_update(self, number: int, into: Vector) -> Update:
        with self._reaching():
            self._stream.ask(StateRequest.COPY_UPDATE, number)
            update = self._stream.update()
            whole = self._stream.fill([into])
        if not whole:
            raise overwritten(number)
        return update

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._stream.close()
            raise UnreachableError(f"the core cannot be reached any more: {error}") from error
