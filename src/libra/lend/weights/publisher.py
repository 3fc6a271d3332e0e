"""A process that sends a node's published weights to followers: `python -m libra.lend.weights.publisher`.

Invariant: the owner never waits for the process, and the process ends with its owner.

The owner writes one JSON line, the order, to standard input of the process, and reads the address for followers from
standard output. The owner then reports each published version with its place in the inherited memory, as in the message
to engines. The publisher skips a version if a newer one is reported before the publisher begins it. A version that is
overwritten before the publisher has read it ends the lineage; the next version begins a new lineage.
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
    """Order to a publisher. `descriptor`, which the process inherits, is the memory in which a trainer publishes, as in
    `WeightBuffer`."""

    grid: Grid
    descriptor: int
    host: str
    token: str
    port: int = 0  # 0: any free port
    threads: int = 1  # threads that encode deltas


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
            print(f"weights: {error}; followers get the whole next version", file=sys.stderr, flush=True)
            source = Source(feed, secrets.token_hex(8), threads=threads)


def main() -> None:
    die_with(os.getppid())
    asyncio.run(publish(msgspec.json.decode(sys.stdin.readline(), type=PublishWeights)))


if __name__ == "__main__":
    main()
