"""The worker's end of a handle's socket, moved by the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import ControllerChannel, ToWorker, WorkerChannel
from libra.backends.transport.engine_messages import Generated, Piece
from libra.backends.transport.messages import Message

PATIENCE = 20.0  # seconds after which a test that would hang fails

H = TypeVar("H", bound=Handle)


class FarEnd:
    """A worker without a process: receives orders, sends answers, goes away."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._connection = connection
        self._channel = WorkerChannel(connection)

    async def receive(self) -> ToWorker:
        return await asyncio.to_thread(self._channel.receive)

    def nothing_waits(self) -> bool:
        return not self._channel.poll()

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def send_bytes(self, data: bytes) -> None:
        self._connection.sendall(data)

    def close(self) -> None:
        with suppress(OSError):  # it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in `receive`
        self._connection.close()


async def connect(kind: type[H], on_lost: Callable[[str, str], object], name: str = "w0") -> tuple[H, FarEnd]:
    """A handle and the far end of its socket."""
    ours, theirs = socket.socketpair()
    return kind(WorkerLink(name, 4711, await ControllerChannel.open(ours), (0,), 0), on_lost), FarEnd(theirs)


def piece(turn: str, *tokens: int, version: int = 0) -> Piece:
    """Tokens of a turn; their log-probs tell which they are."""
    return Piece(turn, version, list(tokens), [-0.5 * token for token in tokens])


def generated(
    *pieces: Piece,
    ended: Sequence[str] = (),
    busy: float = 0.0,
    iterations: int = 0,
    tokens: int = 0,
    prefilled: int = 0,
) -> Generated:
    return Generated(list(pieces), list(ended), busy, prefilled, iterations, tokens)


def whole(turn: str, *tokens: int) -> Generated:
    """A turn from its first token to its end."""
    return generated(piece(turn, *tokens), ended=[turn])
