"""A slow link between two places on this machine: a process that forwards TCP connections at a rate and with a delay.

Invariant: in each direction no more than `rate` bytes cross it in a second, all connections together, and no byte
leaves it earlier than `delay` seconds after it crossed. What a busy machine holds up is sent on when it gets to it; the
link itself goes on meanwhile. It holds no more than is under way on such a link and one piece of each connection, so a
sender feels how slow it is.

    python -m tests.fakes.slow_link --to PORT --rate 12.5e6 --delay 0.02

It listens on 127.0.0.1 and says where, as a line of JSON; then, for every line that it reads, how many bytes have
crossed it in each direction. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence

_PIECE = 1 << 14  # bytes that are sent at a time
_AT_ONCE = 0.002  # seconds; a piece that is read faster was there already, and the link would have sent it


class Direction:
    """One direction of the link. A token bucket whose tokens are seconds: each piece takes the link for as long as its
    bytes take at the rate, after the piece before."""

    def __init__(self, rate: float, delay: float) -> None:
        self._rate, self._delay = rate, delay
        self._free = 0.0  # when the link has sent what it has
        self._most = rate * delay + _PIECE  # bytes under way
        self._waiting = 0  # bytes that are
        self._taken = asyncio.Event()
        self.bytes = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the bytes that one end sends, until its end of file."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = asyncio.create_task(self._deliver(under_way, writer))
        late = 0.0  # seconds for which this process held up a piece that was there
        try:
            while True:
                asked = time.monotonic()
                if not (piece := await reader.read(_PIECE)):
                    break
                came = time.monotonic()
                if came - asked < _AT_ONCE:
                    came -= late
                while self._waiting > self._most:
                    self._taken.clear()
                    await self._taken.wait()
                self._free = max(self._free, came) + len(piece) / self._rate
                self.bytes += len(piece)
                self._waiting += len(piece)
                under_way.put_nowait((self._free + self._delay, piece))
                await asyncio.sleep(max(0.0, self._free - time.monotonic()))
                late = time.monotonic() - self._free
            under_way.put_nowait((0.0, b""))
            await delivering
        finally:
            delivering.cancel()
            writer.close()

    async def _deliver(self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while (entry := await under_way.get())[1]:
            due, piece = entry
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            writer.write(piece)
            await writer.drain()
            self._waiting -= len(piece)
            self._taken.set()


@contextlib.asynccontextmanager
async def slow_link(to: int, rate: float, delay: float) -> AsyncIterator[tuple[int, Direction, Direction]]:
    """The port of a link to another one on this machine, and its directions: there, and back."""
    there, back = Direction(rate, delay), Direction(rate, delay)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", to)
        except OSError:
            writer.close()
            return
        ways = (there.forward(reader, to_writer), back.forward(to_reader, writer))
        tasks = [asyncio.create_task(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], there, back
    finally:
        server.close()


async def _serve(to: int, rate: float, delay: float) -> None:
    async with slow_link(to, rate, delay) as (port, there, back):
        print(json.dumps({"port": port}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"there": there.bytes, "back": back.bytes}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.slow_link")
    parser.add_argument("--to", type=int, required=True, metavar="PORT", help="where it leads, on 127.0.0.1")
    parser.add_argument("--rate", type=float, required=True, help="bytes a second in each direction")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that every byte is under way (default: 0)")
    options = parser.parse_args(arguments)
    asyncio.run(_serve(options.to, options.rate, options.delay))
    return 0


if __name__ == "__main__":
    sys.exit(main())
