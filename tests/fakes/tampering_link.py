"""A way between two ends on this machine that does something to what a sender says, frame by frame."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Callable, Iterable

from libra.lend.weights.node import Address

Tampering = Callable[[int, bytes], Iterable[bytes]]  # number of a frame on its connection, and the frame


class TamperingLink:
    """`cut` ends all connections. What the receiver says passes as it is."""

    def __init__(self, to: Address, tamper: Tampering) -> None:
        self._to, self._tamper = to, tamper
        self._writers: set[asyncio.StreamWriter] = set()
        self.connections = self.frames = self.bytes = 0
        self.address: Address

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TamperingLink]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            yield self
        finally:
            server.close()
            self.cut()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            up_reader, up_writer = await asyncio.open_connection(self._to.host, self._to.port)
        except OSError:
            writer.close()
            return
        ends = {writer, up_writer}
        self._writers |= ends
        up = asyncio.create_task(self._pass_up(reader, up_writer))
        try:
            await self._pass_down(up_reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            up.cancel()
            self._writers -= ends
            for end in ends:
                end.close()

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
        writer.close()

    async def _pass_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in itertools.count():
            head = await reader.readexactly(12)
            frame = head + await reader.readexactly(struct.unpack_from("!I", head)[0])
            self.frames += 1
            self.bytes += len(frame)
            for each in self._tamper(number, frame):
                writer.write(each)
            await writer.drain()
