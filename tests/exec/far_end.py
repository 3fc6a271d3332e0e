"""The worker's end of a handle's socket, moved by the test."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TypeVar

from libra.exec.channel import ControllerChannel, WorkerChannel
from libra.exec.handles import Handle
from libra.exec.launch_local import WorkerLink
from libra.exec.messages import Message, ToWorker, Turn, Turns

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

    def hang_up(self) -> None:
        """As when its process ends, also while `receive` waits."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


async def connect(kind: type[H], on_lost: Callable[[str, str], object], name: str = "w0") -> tuple[H, FarEnd]:
    """A handle and the far end of its socket."""
    ours, theirs = socket.socketpair()
    return kind(WorkerLink(name, 4711, await ControllerChannel.open(ours)), on_lost), FarEnd(theirs)


def turn(request: str, *tokens: int) -> Turn:
    return Turn(request, list(tokens), [-0.5] * len(tokens), [(0, 0)], 3, 0, 0.1)


def turns(*finished: Turn, busy: float = 0.0, iterations: int = 0, generated: int = 0, prefilled: int = 0) -> Turns:
    return Turns(list(finished), busy, prefilled, iterations, generated, 0)
