"""Two clusters of three nodes and a slow link between them: everything once, then versions as they are published.

Invariant: each node is a process of its own, and so is the link; all sockets are real. A version counts as there when
every node's engines were told to load it. On a busy machine both ends are slower than the link, so what the link alone
takes for everything stands beside what it took. Weights are bf16 numbers that AdamW steps on, gradients are noise: what
matters here is the way; how many numbers change is what `steps` measures on a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from statistics import median

import msgspec
import psutil
import torch

from benchmarks.rows import Row
from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import BUFFERS, Vector
from libra.backends.weights.copying import difference
from libra.backends.weights.grid import Grid
from libra.lend.weights.follower import FollowerPlace, FollowerWord, FollowWeights
from libra.lend.weights.node import Address
from libra.lend.weights.publisher import PublishWeights

_NUMBERS = 32 << 20
_RATE, _DELAY = 6.25e6, 0.02  # 50 Mbit/s: as long for these 67 MB as 10 Gbit/s are for 13 GB
_LEARNING_RATE = 1e-6
_VERSIONS = 5
_NODES = 3  # of each cluster


def measured() -> list[Row]:
    return asyncio.run(_measured())


async def _measured() -> list[Row]:
    grid, token, weights = Grid(2 * _NUMBERS, "bfloat16"), secrets.token_hex(16), _versions()
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(_publishing(grid, token))
        link = await stack.enter_async_context(_link(publisher.address.port))
        nodes: list[_Follower] = []
        for way in (publisher.address, Address("127.0.0.1", link.port)):
            relay = await stack.enter_async_context(_following(grid, token, way))
            nodes.append(relay)
            for _ in range(_NODES - 1):
                nodes.append(await stack.enter_async_context(_following(grid, token, relay.address)))
        seconds, crossed, sizes, computed = list[float](), list[int](), list[int](), list[float]()
        last = next(weights)
        for version in range(_VERSIONS + 1):
            content = next(weights) if version else last
            if version:
                sizes.append(len(difference(last, content)))
            last, before = content, await link.crossed()
            spent = sum(node.computed() for node in (publisher, *nodes))
            began = publisher.publish(version, content)
            seconds.append(await _loaded(nodes, version, content) - began)
            computed.append(sum(node.computed() for node in (publisher, *nodes)) - spent)
            crossed.append(await link.crossed() - before)
    full, took, least = seconds[0], median(seconds[1:]), grid.size / _RATE
    whole, most = crossed[0] / grid.size, max(each / one for each, one in zip(crossed[1:], sizes, strict=True))
    case = f"{2 * _NODES} nodes, {8e-6 * _RATE:g} Mbit/s, {1e3 * _DELAY:g} ms"
    return [
        Row(case, "weights", grid.size / 1e6, "MB"),
        Row(case, "everything to all nodes", full, "s"),
        Row(case, "crossed the link, of everything", whole, "times", "<= 1.05", whole <= 1.05),
        Row(case, "everything at the link's rate", least, "s"),
        Row(case, "a version to all nodes, median", took, "s"),
        Row(case, "a version, CPU time of all processes", median(computed[1:]), "s"),
        Row(case, "everything over a version", full / took, "x", ">= 15", full >= 15 * took),
        Row(case, "everything at the link's rate, over a version", least / took, "x"),
        Row(case, "a version, of everything", 100 * median(sizes) / grid.size, "% of dense"),
        Row(case, "crossed the link, of a version, most", most, "times", "<= 1.05", most <= 1.05),
        Row(case, "load of the machine", os.getloadavg()[0], "processes"),
    ]


def _versions() -> Iterator[Vector]:
    """Weights of a trained model's size, and AdamW's steps on them once its moments have settled."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weights = torch.nn.Parameter(torch.empty(_NUMBERS).normal_(0, 0.02))
    optimiser = torch.optim.AdamW([weights], lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    weights.grad = torch.empty(_NUMBERS)
    for step in range(8 + _VERSIONS):
        weights.grad.normal_()
        optimiser.step()
        if step >= 7:
            yield weights.detach().to(torch.bfloat16).view(torch.uint8).numpy()


class _Link:
    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process, self.port = process, port

    async def crossed(self) -> int:
        """Bytes to the far cluster so far; it is the far end that connects."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return int(json.loads(await self._process.stdout.readline())["back"])


@contextlib.asynccontextmanager
async def _link(port: int) -> AsyncIterator[_Link]:
    command = ("-m", "benchmarks.weights.slow_link", "--to", str(port), "--rate", str(_RATE), "--delay", str(_DELAY))
    async with _process(*command) as process:
        assert process.stdout is not None
        yield _Link(process, json.loads(await process.stdout.readline())["port"])


class _Node:
    """A process, and the memory that it shares with its owner, a trainer or engines."""

    def __init__(self, process: asyncio.subprocess.Process, memory: int, grid: Grid) -> None:
        self._process, self._memory, self._grid = process, memory, grid
        self.address: Address

    async def word(self) -> FollowerPlace | LoadWeights:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return msgspec.json.decode(line, type=FollowerWord)  # type: ignore[no-any-return]

    def computed(self) -> float:
        """Seconds of CPU time so far."""
        spent = psutil.Process(self._process.pid).cpu_times()
        return spent.user + spent.system

    def tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")


class _Publisher(_Node):
    def publish(self, version: int, content: Vector) -> float:
        """Publish a version as a trainer does; returns the time at which its content was in memory."""
        buffer = version % BUFFERS
        os.pwrite(self._memory, content.data, buffer * self._grid.size)
        order = LoadWeights(version, buffer, zlib.crc32(content.data))
        began = time.monotonic()
        self.tell(msgspec.json.encode(order))
        return began


class _Follower(_Node):
    def check(self, order: FollowerPlace | LoadWeights, version: int, content: Vector) -> None:
        """Check that the order loads this version, with the published content. Then report it as loaded."""
        assert isinstance(order, LoadWeights) and order.version == version, order
        found = os.pread(self._memory, len(content), order.buffer * self._grid.size)
        assert zlib.crc32(found) == order.checksum == zlib.crc32(content.data)
        self.tell(b"loaded")


async def _loaded(nodes: list[_Follower], version: int, content: Vector) -> float:
    """Time at which the last node said that its engines may load this version."""
    orders = await asyncio.gather(*(node.word() for node in nodes))
    told = time.monotonic()
    for node, order in zip(nodes, orders, strict=True):
        node.check(order, version, content)
    return told


@contextlib.asynccontextmanager
async def _publishing(grid: Grid, token: str) -> AsyncIterator[_Publisher]:
    async with _sharing(grid, "libra.lend.weights.publisher") as (process, memory):
        node = _Publisher(process, memory, grid)
        await _begin(node, PublishWeights(grid, memory, "127.0.0.1", token))
        yield node


@contextlib.asynccontextmanager
async def _following(grid: Grid, token: str, way: Address) -> AsyncIterator[_Follower]:
    async with _sharing(grid, "libra.lend.weights.follower") as (process, memory):
        node = _Follower(process, memory, grid)
        await _begin(node, FollowWeights(grid, memory, "127.0.0.1", token, [[way]]))
        yield node


async def _begin(node: _Node, order: PublishWeights | FollowWeights) -> None:
    node.tell(msgspec.json.encode(order))
    place = await node.word()
    assert isinstance(place, FollowerPlace)
    node.address = Address("127.0.0.1", place.port)


@contextlib.asynccontextmanager
async def _sharing(grid: Grid, module: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    memory = os.memfd_create("weights", 0)
    os.ftruncate(memory, BUFFERS * grid.size)
    try:
        async with _process("-m", module, inherited=(memory,)) as process:
            yield process, memory
    finally:
        os.close(memory)


@contextlib.asynccontextmanager
async def _process(*command: str, inherited: tuple[int, ...] = ()) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=pipe, stdout=pipe, pass_fds=inherited
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
