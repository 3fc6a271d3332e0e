"""kill -9 of who sends weights, who passes them on and who keeps them, in each of their states."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import zlib
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import BUFFERS, Vector
from libra.backends.weights.grid import Grid
from libra.lend.weights.follower import FollowerPlace, FollowerWord, FollowWeights
from libra.lend.weights.node import Address, LinkPatience
from libra.lend.weights.publisher import PublishWeights

GRID = Grid(1_000_000, "bfloat16", 65536)
PATIENCE = LinkPatience(attempts=6, pause=0.01)
TOKEN = "word"


def content_of(version: int) -> Vector:
    content = np.random.default_rng(0).integers(0, 255, GRID.size, dtype=np.uint8)
    content[:: 7 + version] += version
    return content


class Child:
    """A publisher or a follower, with the memory of two halves that it works on."""

    def __init__(self, process: asyncio.subprocess.Process, memory: int) -> None:
        self.process, self._memory = process, memory
        self.address: Address

    async def word(self) -> FollowerPlace | LoadWeights:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        found: FollowerPlace | LoadWeights = msgspec.json.decode(line, type=FollowerWord)
        return found

    def say(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")

    def publish(self, version: int) -> None:
        content, half = content_of(version), version % BUFFERS
        os.pwrite(self._memory, content.data, half * GRID.size)
        self.say(msgspec.json.encode(LoadWeights(version, half, zlib.crc32(content.data))))

    async def has(self, version: int, *, loads: bool = True) -> int:
        """It says that this version is there, and it is; in which half."""
        order = await self.word()
        assert isinstance(order, LoadWeights) and order.version == version
        self.require(order)
        if loads:
            self.say(b"loaded")
        return order.buffer

    def require(self, order: LoadWeights) -> None:
        content = os.pread(self._memory, GRID.size, order.buffer * GRID.size)
        assert zlib.crc32(content) == order.checksum == zlib.crc32(content_of(order.version).data)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def last_words(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@contextlib.asynccontextmanager
async def child(module: str, order: type, *ways: Address) -> AsyncIterator[Child]:
    memory = os.memfd_create("weights", 0)
    os.ftruncate(memory, BUFFERS * GRID.size)
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", f"libra.lend.weights.{module}")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(memory,))
    try:
        made = Child(process, memory)
        if order is PublishWeights:
            made.say(msgspec.json.encode(PublishWeights(GRID, memory, "127.0.0.1", TOKEN)))
        else:
            made.say(
                msgspec.json.encode(FollowWeights(GRID, memory, "127.0.0.1", TOKEN, [list(ways)], patience=PATIENCE))
            )
        place = await made.word()
        assert isinstance(place, FollowerPlace)
        made.address = Address("127.0.0.1", place.port)
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(memory)


def publisher() -> contextlib.AbstractAsyncContextManager[Child]:
    return child("publisher", PublishWeights)


def follower(*ways: Address) -> contextlib.AbstractAsyncContextManager[Child]:
    return child("follower", FollowWeights, *ways)


@pytest.mark.parametrize("state", ["starting", "idle", "sending"])
async def test_a_publisher_that_is_killed_leaves_what_was_whole_and_another_one_goes_on(state: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(publisher())
        node = await stack.enter_async_context(follower(first.address))
        half = -1
        if state != "starting":
            first.publish(0)
            half = await node.has(0)
        if state == "sending":
            first.publish(1)
        await first.kill()
        said = await node.last_words()  # it gives up, in a line
        assert said.startswith("weights: no weights after 6 attempts") and said.count("\n") == 1
        left = await node.process.stdout.read() if node.process.stdout is not None else b""
        whole = [msgspec.json.decode(line, type=FollowerWord) for line in left.splitlines()]
        assert len(whole) <= (state == "sending")  # version 1 where it had come by then
        for order in whole:
            assert isinstance(order, LoadWeights)
            node.require(order)
        if half >= 0 and not whole:
            node.require(LoadWeights(0, half, zlib.crc32(content_of(0).data)))
        second = await stack.enter_async_context(publisher())
        again = await stack.enter_async_context(follower(second.address))
        second.publish(2)
        await again.has(2)


@pytest.mark.parametrize("state", ["starting", "idle", "passing on", "loading"])
async def test_a_relay_that_is_killed_is_gone_round(state: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(publisher())
        relay = await stack.enter_async_context(follower(source.address))
        node = await stack.enter_async_context(follower(relay.address, source.address))
        if state != "starting":
            source.publish(0)
            await node.has(0)
            await relay.has(0, loads=state != "loading")
        if state == "passing on":
            source.publish(1)
        await relay.kill()
        if state == "passing on":
            await node.has(1)
        source.publish(2)
        await node.has(2)
        new = await stack.enter_async_context(follower(source.address))
        await new.has(2)


@pytest.mark.parametrize("state", ["idle", "receiving", "loading"])
async def test_who_is_killed_as_he_receives_leaves_the_half_that_engines_load(state: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(publisher())
        node = await stack.enter_async_context(follower(source.address))
        other = await stack.enter_async_context(follower(source.address))
        source.publish(0)
        half = await node.has(0, loads=state != "loading")
        await other.has(0)
        if state != "idle":
            source.publish(1)
        await node.kill()
        if state != "receiving":  # else version 1 may have come, and been told, and the next be on its way over it
            node.require(LoadWeights(0, half, zlib.crc32(content_of(0).data)))
        if state != "idle":
            await other.has(1)  # who was beside it noticed nothing
        source.publish(2)
        await other.has(2)
