"""A process that keeps a node's weights, for engines in other processes: `python -m libra.lend.weights.follower`.

Invariant: the process reports each version to its owner, and does not write to that half of the memory before the owner
has answered. The process ends with its owner.

The owner writes one JSON line, the order, to standard input of the process. On standard output the process first writes
the address at which others may follow this node, and then each version. The owner answers each version with a line when
its engines have loaded the version. The last line of standard error is the reason why the process ended.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import sys

import msgspec
import numpy as np

from libra.backends.launch.worker import die_with
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import BUFFERS, WeightUpdateError
from libra.backends.weights.grid import Grid
from libra.lend.weights.node import Address, LinkPatience, UpstreamLostError, WeightsNode, served


class FollowWeights(msgspec.Struct, frozen=True):
    """Order to a follower. `descriptor`, which the process inherits, is the memory that engines load from, as in
    `WeightBuffer`. `sources` are the addresses of each source: relays first, then the source that they follow. `ranges`
    are the bytes that engines read; empty: all."""

    grid: Grid
    descriptor: int
    host: str  # where others may follow
    token: str
    sources: list[list[Address]]
    ranges: list[tuple[int, int]] = []
    patience: LinkPatience = LinkPatience()


class FollowerPlace(msgspec.Struct, frozen=True, tag=True):
    """The address at which others may follow this node."""

    port: int


FollowerWord = FollowerPlace | LoadWeights


async def follow(order: FollowWeights) -> None:
    """Follow the sources. Raises `UpstreamLostError` when all are lost, and `EOFError` when the owner ends."""
    grid, owner = order.grid, asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(owner), sys.stdin)
    if os.fstat(order.descriptor).st_size < BUFFERS * grid.size:
        os.ftruncate(order.descriptor, BUFFERS * grid.size)
    memory = np.frombuffer(mmap.mmap(order.descriptor, BUFFERS * grid.size), np.uint8)

    loaded: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen() -> None:
        while answer := await owner.readline():
            loaded.put_nowait(answer)
        raise EOFError("the owner of the follower has ended")

    async def load(weights: LoadWeights) -> None:
        _say(weights)
        await loaded.get()

    halves = memory[: grid.size], memory[grid.size : 2 * grid.size]
    wanted = grid.touched(order.ranges) if order.ranges else None
    node = WeightsNode(grid, halves, load, wanted)
    async with served(node.feed, order.host, order.token, order.patience) as address:
        _say(FollowerPlace(address.port))
        await asyncio.gather(node.follow(order.sources, order.token, order.patience), listen())


def _say(word: FollowerWord) -> None:
    print(msgspec.json.encode(word).decode(), flush=True)


def main() -> None:
    die_with(os.getppid())
    order = msgspec.json.decode(sys.stdin.readline(), type=FollowWeights)
    try:
        asyncio.run(follow(order))
    except EOFError:
        pass
    except (OSError, UpstreamLostError, WeightUpdateError) as error:
        sys.exit(f"weights: {error}")


if __name__ == "__main__":
    main()
