"""A process that keeps a node's weights, for engines in other processes: `python -m libra.lend.weights.follower`.

Invariant: the process reports each version to its owner, and then does not write to that half of the memory before the
owner has answered. It ends with its owner. The owner writes one JSON line, the order, to the standard input of the
process. From its standard output the owner reads the address at which others may follow this node, and then each
version. The owner answers each version with a line when its engines have loaded it. The last line of standard error is
the reason of its end.
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
    """Order to a follower. `descriptor` is the memory that engines load from, as in `WeightBuffer`, and the process
    inherits it. `sources` are the addresses of each source, a relay before its own source. `ranges` are the bytes that
    engines read, or empty for all."""

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
    """Follow until the sources are lost (raises `UpstreamLostError`), or the owner ends (raises `EOFError`)."""
    grid, owner = order.grid, asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(owner), sys.stdin)
    if os.fstat(order.descriptor).st_size < BUFFERS * grid.size:
        os.ftruncate(order.descriptor, BUFFERS * grid.size)
    memory = np.frombuffer(mmap.mmap(order.descriptor, BUFFERS * grid.size), np.uint8)

    loaded: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen() -> None:
        while answer := await owner.readline():
            loaded.put_nowait(answer)
        raise EOFError("its owner has ended")

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
