"""A process that gives a node's published weights to others: `python -m libra.lend.weights.publisher`.

Invariant: its owner never waits for it, and it ends with its owner. The owner writes one JSON line, the order, to its
standard input, and reads the address for followers from its standard output. It then reports each published version
with its place in the inherited memory, as in the message to engines. A version that is overtaken before the publisher
begins it is skipped. One that is overwritten before it was read ends the lineage, and the next begins a new one.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import sys

import msgspec
import numpy as np

from libra.backends.launch.worker import die_with
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import BUFFERS, Vector, WeightUpdateError
from libra.backends.weights.grid import Grid
from libra.lend.weights.feed import Feed
from libra.lend.weights.follower import FollowerPlace
from libra.lend.weights.node import served
from libra.lend.weights.source import Source


class PublishWeights(msgspec.Struct, frozen=True):
    """Order to a publisher. `descriptor` is the memory in which a trainer publishes, as in `WeightBuffer`, and the
    process inherits it."""

    grid: Grid
    descriptor: int
    host: str
    token: str
    port: int = 0  # any
    threads: int = 1  # that make deltas


async def publish(order: PublishWeights) -> None:
    """Publish until the owner ends."""
    grid, owner = order.grid, asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(owner), sys.stdin)
    memory = np.frombuffer(mmap.mmap(order.descriptor, BUFFERS * grid.size, access=mmap.ACCESS_READ), np.uint8)
    feed = Feed(grid, np.ones(len(grid), np.bool_))
    latest: asyncio.Queue[LoadWeights] = asyncio.Queue(1)
    async with served(feed, order.host, order.token, port=order.port) as address:
        print(msgspec.json.encode(FollowerPlace(address.port)).decode(), flush=True)
        publishing = asyncio.create_task(_publish(feed, memory, latest, order.threads))
        try:
            while told := await owner.readline():
                if latest.full():
                    latest.get_nowait()
                latest.put_nowait(msgspec.json.decode(told, type=LoadWeights))
                if publishing.done():
                    return publishing.result()
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)


async def _publish(feed: Feed, memory: Vector, latest: asyncio.Queue[LoadWeights], threads: int) -> None:
    size = feed.grid.size
    source = Source(feed, secrets.token_hex(8), threads=threads)
    while True:
        weights = await latest.get()
        content = memory[weights.buffer * size : (weights.buffer + 1) * size]
        try:
            await source.publish(weights.version, content, weights.checksum)
        except WeightUpdateError as error:
            print(f"weights: {error}; all followers get everything of the next", file=sys.stderr, flush=True)
            source = Source(feed, secrets.token_hex(8), threads=threads)


def main() -> None:
    die_with(os.getppid())
    asyncio.run(publish(msgspec.json.decode(sys.stdin.readline(), type=PublishWeights)))


if __name__ == "__main__":
    main()
