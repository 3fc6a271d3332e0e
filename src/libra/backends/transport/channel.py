"""Frames on a socket: four bytes of length, then one message in MessagePack, which unlike JSON has NaN and infinity.

Invariant: a frame is delivered whole or not at all. A lost peer raises `ConnectionError`, and an unknown message
`msgspec.ValidationError`.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from typing import Generic, TypeVar

import msgspec

from libra.backends.transport.engine_messages import EngineAnswer, EngineOrder
from libra.backends.transport.messages import Acknowledged, Failure, Message, Ready, Stop
from libra.backends.transport.trainer_messages import TrainerAnswer, TrainerOrder

ToWorker = EngineOrder | TrainerOrder | Stop
FromWorker = EngineAnswer | TrainerAnswer | Ready | Acknowledged | Failure

_LENGTH = struct.Struct("!I")
LARGEST_FRAME = 256 << 20  # bytes; a longer frame means that the peer is broken

_encoder = msgspec.msgpack.Encoder()


Received = TypeVar("Received")


def _frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    if len(body) > LARGEST_FRAME:
        raise ValueError(f"{type(message).__name__} of {len(body)} bytes exceeds the frame limit of {LARGEST_FRAME}")
    return _LENGTH.pack(len(body)) + body


def _length(header: bytes) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > LARGEST_FRAME:
        raise ConnectionAbortedError(f"the peer announced {length} bytes, but the frame limit is {LARGEST_FRAME}")
    return length


def _message(decoder: msgspec.msgpack.Decoder[Received], body: bytes) -> Received:
    try:
        return decoder.decode(body)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.ValidationError(str(error)) from None


class _BlockingChannel(Generic[Received]):
    """An end whose `receive` blocks until the next message."""

    _gone: str  # error message for a closed connection
    _decoder: msgspec.msgpack.Decoder[Received]

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        self._connection.sendall(_frame(message))

    def receive(self) -> Received:
        return _message(self._decoder, self._read(_length(self._read(_LENGTH.size))))

    def poll(self, seconds: float | None = 0.0) -> bool:
        """Whether a message (or the end of the connection) is waiting, after at most `seconds`; None: wait for one."""
        readable, _, _ = select.select([self._connection], [], [], seconds)
        return bool(readable)

    def close(self) -> None:
        self._connection.close()

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._connection.recv(count - len(parts))
            except ConnectionResetError:  # the peer was killed before it had read everything
                part = b""
            if not part:
                raise ConnectionResetError(self._gone)
            parts += part
        return bytes(parts)


class WorkerChannel(_BlockingChannel[ToWorker]):
    """The worker's end, which is blocking, or polled between engine iterations."""

    _gone, _decoder = "the controller closed the connection", msgspec.msgpack.Decoder(ToWorker)


class PeerChannel(_BlockingChannel[FromWorker]):
    """A worker's end of the channel to a process that it forked: it sends orders and receives answers."""

    _gone, _decoder = "the process closed the connection", msgspec.msgpack.Decoder(FromWorker)


class _AsyncChannel(Generic[Received]):
    """An end for asyncio."""

    _gone: str  # error message for a closed connection
    _decoder: msgspec.msgpack.Decoder[Received]

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: Message) -> None:
        """Queue a message. If the peer is lost, `receive` reports it."""
        self._writer.write(_frame(message))

    async def receive(self) -> Received:
        try:
            length = _length(await self._reader.readexactly(_LENGTH.size))
            return _message(self._decoder, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            if isinstance(error, ConnectionResetError) and error.errno is None:
                raise  # `sever` set this error
            raise ConnectionResetError(self._gone) from None  # the peer closed it, or was killed

    def sever(self, why: str) -> None:
        """Make `receive` fail, for a lost worker whose connection does not show the loss."""
        self._reader.set_exception(ConnectionResetError(why))

    def close(self) -> None:
        self._writer.close()


class ControllerChannel(_AsyncChannel[FromWorker]):
    """The controller's end."""

    _gone, _decoder = "the worker closed the connection", msgspec.msgpack.Decoder(FromWorker)

    @classmethod
    async def open(cls, connection: socket.socket) -> ControllerChannel:
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        return cls(reader, writer)


class AgentChannel(_AsyncChannel[ToWorker]):
    """The end of an agent, which passes a controller's orders on to an engine."""

    _gone, _decoder = "the controller closed the connection", msgspec.msgpack.Decoder(ToWorker)
