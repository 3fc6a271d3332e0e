"""Relay of a core's state to another node: a process next to the core replica, through which one joiner reads.

Invariant: the core never waits for the relay, which reads shared memory like any joiner on the core's own node. A frame
whose checksum is wrong ends the connection. Neither end waits longer than `SILENT_SECONDS` for a due frame, or keeps a
copy of a vector. The relay listens at its given address, serves the reader that sends the token, and ends with that
reader or with its core. It does not import torch, so it starts in tenths of a second.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import subprocess
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, TypeVar

import msgspec
import numpy as np

from libra.backends.grpo.publication import (
    OverrunError,
    Shape,
    SharedPublication,
    State,
    UnreachableError,
    Update,
    overwritten,
)
from libra.backends.launch.worker import die_with
from libra.backends.transport.shared_memory import LayoutError, Vector
from libra.backends.transport.trainer_messages import RelayPlace, Serve, StatePlace

# A healthy peer sends a frame in milliseconds, on a loaded machine in seconds. The controller waits a little longer for
# a joiner (`Patience.floor`), so that the joiner can report a broken connection to the core.
SILENT_SECONDS = 8.0
READER_SECONDS = 60.0  # in which the reader must connect
GREETING_SECONDS = 5.0  # in which a connection must send the token, since all others wait for it
IDLE_SECONDS = 300.0  # between two requests; a reader may wait for the next membership in that time
_STARTING_SECONDS = 30.0  # the relay's socket exists before its process has started
_NICE = 10  # other processes on its cores have priority

_PIECE_BYTES = 1 << 20
_LARGEST_MESSAGE = 4096  # bytes
_HEAD = struct.Struct("!II")  # head of a frame: number of bytes that follow, and their CRC-32


class Greeting(msgspec.Struct, frozen=True):
    token: str
    shape: Shape


class RelayRequest(msgspec.Struct, frozen=True):
    """Request for the state, for the update to state `number`, or for whether the state is whole."""

    what: Literal["at rest", "state", "update"]
    number: int = 0


class RelayAnswer(msgspec.Struct, frozen=True):
    """An answer. If it has a `content`, vectors follow it, and then an answer that says whether they stayed whole."""

    verdict: Literal["yes", "no", "overrun", "other shape"]
    content: State | Update | None = None


YES, NO = RelayAnswer("yes"), RelayAnswer("no")

M = TypeVar("M", Greeting, RelayRequest, RelayAnswer)


class StateStream:
    """One end of the connection. Every method raises `OSError` if the other end is gone, is silent, or sends an unknown
    message."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # requests are small, and their senders wait

    def close(self) -> None:
        self._connection.close()

    def send(self, message: Greeting | RelayRequest | RelayAnswer) -> None:
        self._send(msgspec.msgpack.encode(message))

    def receive(self, kind: type[M], seconds: float | None = None) -> M:
        """Wait for a message, at most `seconds` (None: `SILENT_SECONDS`)."""
        ends = _ends(seconds)
        count, checksum = self._head(ends)
        if count > _LARGEST_MESSAGE:
            raise ConnectionAbortedError(f"{count} bytes are not a {kind.__name__}")
        body = bytearray(count)
        self._body(memoryview(body), checksum, ends)
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConnectionAbortedError(f"this is not a {kind.__name__}: {error}") from None

    def send_vectors(self, vectors: Sequence[Vector], is_whole: Callable[[], bool]) -> None:
        """Send the vectors while they are unchanged, then whether they stayed unchanged to the end."""
        for vector in vectors:
            data = vector.view(np.uint8).data
            for start in range(0, len(data), _PIECE_BYTES):
                if not is_whole():
                    break
                self._send(_copy(data[start : start + _PIECE_BYTES]))
        self._send(b"")
        self.send(YES if is_whole() else NO)

    def fill(self, vectors: Sequence[Vector]) -> bool:
        """Fill the vectors; returns whether they are of one publication. If not, they have parts of several."""
        rooms = [vector.view(np.uint8).data for vector in vectors]
        while True:
            ends = _ends(None)
            count, checksum = self._head(ends)
            if count == 0:
                break
            if not rooms or count > len(rooms[0]):
                raise ConnectionAbortedError("more was sent than requested")
            self._body(rooms[0][:count], checksum, ends)
            rooms[0] = rooms[0][count:]
            if not rooms[0]:
                del rooms[0]
        whole = self.receive(RelayAnswer) == YES
        if whole and rooms:
            raise ConnectionAbortedError("less was sent than requested")
        return whole

    def _send(self, body: bytes) -> None:
        self._connection.settimeout(SILENT_SECONDS)
        self._connection.sendall(_HEAD.pack(len(body), zlib.crc32(body)))
        self._connection.sendall(body)

    def _head(self, ends: float) -> tuple[int, int]:
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head), ends)
        count, checksum = _HEAD.unpack(head)
        return count, checksum

    def _body(self, room: memoryview, checksum: int, ends: float) -> None:
        self._fill(room, ends)
        if zlib.crc32(room) != checksum:
            raise ConnectionAbortedError("a frame arrived damaged")

    def _fill(self, room: memoryview, ends: float) -> None:
        while room:
            try:
                self._connection.settimeout(max(1e-6, ends - time.monotonic()))
                count = self._connection.recv_into(room)
            except TimeoutError:
                raise TimeoutError("the other end is silent") from None
            if count == 0:
                raise ConnectionResetError("the other end closed the connection")
            room = room[count:]


def _ends(seconds: float | None) -> float:
    return time.monotonic() + (SILENT_SECONDS if seconds is None else seconds)


def _copy(data: memoryview) -> bytes:
    return bytes(data)


# --- the reader's end ------------------------------------------------------------------------------------------------


class RemotePublication:
    """The publication of a core on another node, through the core's relay; see `Publication`.

    After a silence, an unknown message or the loss of the relay, this connection stays closed.
    """

    def __init__(self, place: RelayPlace, shape: Shape) -> None:
        """Raises `LayoutError`, and `OSError` if the relay is not there or refuses the token."""
        self._stream = StateStream(socket.create_connection((place.host, place.port), SILENT_SECONDS))
        weakref.finalize(self, self._stream.close)
        self._stream.send(Greeting(place.token, shape))
        if self._stream.receive(RelayAnswer, _STARTING_SECONDS) != YES:
            raise LayoutError("the core publishes another model or precision: all replicas must train the same one")

    def at_rest(self) -> bool:
        with self._reaching():
            return self._ask(RelayRequest("at rest")) == YES

    def copy_state(self, into: Sequence[Vector]) -> State | None:
        with self._reaching():
            state = self._ask(RelayRequest("state")).content
            return state if isinstance(state, State) and self._stream.fill(into) else None

    def copy_update(self, number: int, into: Vector) -> Update | None:
        with self._reaching():
            answer = self._ask(RelayRequest("update", number))
            if answer.verdict == "overrun":
                raise OverrunError(f"the update to state {number} is gone")
            if not isinstance(answer.content, Update):
                return None
            if not self._stream.fill([into]):
                raise overwritten(number)
            return answer.content

    def _ask(self, request: RelayRequest) -> RelayAnswer:
        self._stream.send(request)
        return self._stream.receive(RelayAnswer)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._stream.close()
            raise UnreachableError(f"the core cannot be reached: {error}") from error


# --- the relay -------------------------------------------------------------------------------------------------------


class RelayOrder(msgspec.Struct, frozen=True):
    """A relay's order. It comes by standard input, since other users of the machine can see command lines."""

    listener: int  # file descriptor
    serve: Serve
    place: StatePlace
    shape: Shape


class Relay:
    """The core's handle on its relay. The socket listens at once; a reader waits for the process to start."""

    def __init__(self, serve: Serve, place: StatePlace, shape: Shape) -> None:
        """Raises `OSError` if the process cannot be started, or the address is not one of this node."""
        with socket.create_server((serve.host, 0)) as listener:
            self.port: int = listener.getsockname()[1]
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
            )
            order = RelayOrder(listener.fileno(), serve, place, shape)
        assert self._process.stdin is not None
        # If the relay is killed before it reads its order, its reader gets no answer and asks again, as after a later
        # kill.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as standard_input:
            standard_input.write(msgspec.json.encode(order))

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(stream: StateStream, publication: SharedPublication) -> None:
    """Answer a reader's requests. Raises `OSError` when the reader leaves."""
    while True:
        request = stream.receive(RelayRequest, IDLE_SECONDS)
        match request.what:
            case "at rest":
                stream.send(YES if publication.at_rest() else NO)
            case "state":
                state = publication.state()
                stream.send(NO if state is None else RelayAnswer("yes", state))
                if state is not None:
                    stream.send_vectors(publication.vectors, partial(publication.holds_state, state.number))
            case "update":
                try:
                    update = publication.update(request.number)
                except OverrunError:
                    stream.send(RelayAnswer("overrun"))
                    continue
                stream.send(NO if update is None else RelayAnswer("yes", update))
                if update is not None:
                    gradient = publication.gradient(update.number)
                    stream.send_vectors([gradient], partial(publication.holds_update, update.number))


def await_reader(listener: socket.socket, token: str, shape: Shape, seconds: float) -> StateStream:
    """The connection of the first reader that sends the token. Raises `TimeoutError` if none arrives within `seconds`.
    If the reader expects another shape, tells it so and raises `ValueError`."""
    ends = time.monotonic() + seconds
    while True:
        listener.settimeout(max(0.001, ends - time.monotonic()))
        connection, address = listener.accept()
        stream = StateStream(connection)
        try:
            greeting = stream.receive(Greeting, GREETING_SECONDS)
        except OSError as error:
            print(f"{address} did not greet: {error}", file=sys.stderr)
        else:
            if hmac.compare_digest(greeting.token.encode(), token.encode()):
                if greeting.shape == shape:
                    stream.send(YES)
                    return stream
                stream.send(RelayAnswer("other shape"))
                raise ValueError(f"{address} expects {greeting.shape}, the core publishes {shape}")
            print(f"{address} did not send the token", file=sys.stderr)
        stream.close()


def main() -> None:
    die_with(os.getppid())
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=RelayOrder)
    os.sched_setaffinity(0, order.serve.cores)
    os.nice(_NICE)
    publication = SharedPublication(order.place, order.shape)
    with socket.socket(fileno=order.listener) as listener:
        stream = await_reader(listener, order.serve.token, order.shape, READER_SECONDS)
    serve(stream, publication)


if __name__ == "__main__":
    try:
        main()
    except ConnectionResetError:
        pass  # the reader has joined, or is lost
    except (OSError, ValueError, LayoutError) as error:
        sys.exit(f"relay: {error}")
