"""Followers as processes, over a slow link, killed and left alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import zlib
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import BUFFERS, Vector
from libra.backends.weights.grid import Grid
from libra.lend.weights.feed import Feed
from libra.lend.weights.follower import FollowerPlace, FollowerWord, FollowWeights
from libra.lend.weights.node import Address, LinkPatience, served
from libra.lend.weights.publisher import PublishWeights
from libra.lend.weights.source import Source
from tests.fakes.slow_link import slow_link

GRID = Grid(200_000, "bfloat16", 8192)
RATE, DELAY = 2e6, 0.01  # the weights take a tenth of a second
PATIENCE = LinkPatience(pause=0.01)
TOKEN = "word"


def content_of(version: int) -> Vector:
    generator = np.random.default_rng(0)
    content = generator.integers(0, 255, GRID.size, dtype=np.uint8)
    for _ in range(version):
        content[generator.integers(0, GRID.size, 500)] += 1
    return content


class Follower:
    """The owner's end."""

    def __init__(self, process: asyncio.subprocess.Process, memory: int) -> None:
        self.process, self._memory = process, memory
        self.address: Address

    async def word(self) -> FollowerPlace | LoadWeights:
        assert self.process.stdout is not None
        found: FollowerPlace | LoadWeights = msgspec.json.decode(
            await self.process.stdout.readline(), type=FollowerWord
        )
        return found

    async def loads(self, version: int) -> None:
        """What it was told last is this version, and that lies there."""
        assert self.process.stdin is not None
        order = await self.word()
        assert isinstance(order, LoadWeights) and order.version == version
        content = np.frombuffer(os.pread(self._memory, GRID.size, order.buffer * GRID.size), np.uint8)
        assert np.array_equal(content, content_of(version)) and zlib.crc32(content.data) == order.checksum
        self.process.stdin.write(b"loaded\n")


@contextlib.asynccontextmanager
async def following(*ways: Address, patience: LinkPatience = PATIENCE) -> AsyncIterator[Follower]:
    memory = os.memfd_create("weights", 0)
    os.ftruncate(memory, BUFFERS * GRID.size)
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "libra.lend.weights.follower")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(memory,))
    try:
        assert process.stdin is not None
        order = FollowWeights(GRID, memory, "127.0.0.1", TOKEN, [list(ways)], patience=patience)
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        follower = Follower(process, memory)
        place = await follower.word()
        assert isinstance(place, FollowerPlace)
        follower.address = Address("127.0.0.1", place.port)
        yield follower
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(memory)


async def test_versions_over_a_slow_link_by_a_relay_that_is_killed() -> None:
    feed = Feed(GRID, np.ones(len(GRID), np.bool_))
    source = Source(feed, "run")

    async def publish(version: int) -> None:
        content = content_of(version)
        await source.publish(version, content, zlib.crc32(content.data))

    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(served(feed, "127.0.0.1", TOKEN, PATIENCE))
        port, _, back = await stack.enter_async_context(slow_link(address.port, RATE, DELAY))
        link = Address("127.0.0.1", port)
        relay = await stack.enter_async_context(following(link))
        node = await stack.enter_async_context(following(relay.address, link))
        for version in (0, 1):
            await publish(version)
            await asyncio.gather(relay.loads(version), node.loads(version))
        delta = sum(len(kept.frame) for kept in feed.entries())
        assert GRID.size + delta <= back.bytes < 1.05 * (GRID.size + delta)
        relay.process.send_signal(signal.SIGKILL)
        await publish(2)
        await node.loads(2)
        assert back.bytes < GRID.size + 4 * delta  # it asked for no more than it lacked

        assert node.process.stdin is not None  # its owner goes
        node.process.stdin.close()
        assert await node.process.wait() == 0


@contextlib.asynccontextmanager
async def publishing(memory: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, Address]]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "libra.lend.weights.publisher")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(memory,))
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(PublishWeights(GRID, memory, "127.0.0.1", TOKEN)) + b"\n")
        place = msgspec.json.decode(await process.stdout.readline(), type=FollowerPlace)
        yield process, Address("127.0.0.1", place.port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_publisher_gives_what_lies_there_and_says_what_does_not() -> None:
    memory = os.memfd_create("weights", 0)
    os.ftruncate(memory, BUFFERS * GRID.size)
    async with publishing(memory) as (process, address), following(address) as node:
        assert process.stdin is not None and process.stderr is not None

        def publish(version: int, checksum: int | None = None) -> None:
            content = content_of(version)
            os.pwrite(memory, content.data, version % BUFFERS * GRID.size)
            order = LoadWeights(version, version % BUFFERS, zlib.crc32(content.data) if checksum is None else checksum)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(order) + b"\n")

        for version in (0, 1):
            publish(version)
            await node.loads(version)
        publish(2, checksum=42)  # which is overwritten by now
        said = (await process.stderr.readline()).decode()
        assert said.startswith("weights: weights v2 are gone: ") and "followers get the whole next version" in said
        publish(3)
        await node.loads(3)
        process.stdin.close()
        assert await process.wait() == 0
    os.close(memory)


async def test_what_ends_a_follower_is_said_in_a_line() -> None:
    quick = LinkPatience(beat=0.1, silence=1.0, attempts=2, pause=0.001)
    async with following(Address("127.0.0.1", 1), patience=quick) as follower:
        assert follower.process.stderr is not None
        said = (await follower.process.stderr.read()).decode()
        assert said.startswith("weights: no weights after 2 attempts, the last at 127.0.0.1:1: ")
        assert said.count("\n") == 1
        assert await follower.process.wait() == 1


@pytest.mark.parametrize("direction", ["there", "back"])
async def test_a_link_is_no_faster_than_its_rate_nor_earlier_than_its_delay(direction: str) -> None:
    """Time can only be more than that on a busy machine."""
    size, rate, delay, times = 1 << 17, 4e6, 0.05, list[float]()
    clock = asyncio.get_running_loop().time

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(size if direction == "there" else 1)
        writer.write(bytes(1 if direction == "there" else size))
        await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with slow_link(server.sockets[0].getsockname()[1], rate, delay) as (port, there, back):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = clock()
        writer.write(bytes(size if direction == "there" else 1))
        await reader.readexactly(1 if direction == "there" else size)
        times.append(clock() - began)
        writer.close()
    server.close()
    assert times[0] >= size / rate + 2 * delay
    assert (there.bytes, back.bytes) == ((size, 1) if direction == "there" else (1, size))
