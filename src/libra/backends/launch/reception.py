"""Where the workers of a cluster report to the controller.

Invariant: a connection becomes a worker's channel only if it begins with a token that is expected, and each is expected
once. Any other connection is closed, unanswered.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Iterator

from libra.backends.launch.node import keep_alive
from libra.backends.transport.channel import ControllerChannel

_TOKEN_BYTES = 32
_TOKEN_SECONDS = 10.0  # from a connection to its token


class Reception:
    """A listening socket at `address`."""

    def __init__(self) -> None:
        self._expected: dict[bytes, asyncio.Future[ControllerChannel]] = {}
        self.address = ("", 0)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, host: str) -> AsyncIterator[Reception]:
        """Listens on this interface alone, on any free port."""
        reception = cls()
        server = await asyncio.start_server(reception._arrived, host, 0)
        name = server.sockets[0].getsockname()
        reception.address = (name[0], name[1])
        try:
            yield reception
        finally:
            server.close()

    @contextlib.contextmanager
    def expect(self) -> Iterator[tuple[bytes, asyncio.Future[ControllerChannel]]]:
        """A token for one worker, and its channel when it comes; afterwards nobody is let in by it. The channel is the
        caller's, unless this is left by an error: then it is closed, and a worker at its other end goes."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        arrival: asyncio.Future[ControllerChannel] = asyncio.get_running_loop().create_future()
        self._expected[token] = arrival
        try:
            yield token, arrival
        except BaseException:
            if arrival.done() and not arrival.cancelled():
                arrival.result().close()
            raise
        finally:
            self._expected.pop(token, None)

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            token = await asyncio.wait_for(reader.readexactly(_TOKEN_BYTES), _TOKEN_SECONDS)
        except (asyncio.IncompleteReadError, TimeoutError, OSError):
            token = b""
        arrival = self._expected.pop(token, None)
        if arrival is None or arrival.done():
            writer.close()
            return
        connection: socket.socket = writer.get_extra_info("socket")
        keep_alive(connection)
        arrival.set_result(ControllerChannel(reader, writer))
