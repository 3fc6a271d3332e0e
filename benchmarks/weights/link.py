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
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil
import torch

from benchmarks.rows import Row, at_least, at_most
from libra.backends.transport.engine_messages import LoadWeights, WeightsPlace
from libra.backends.transport.shared_memory import BUFFERS, Vector
from libra.backends.weights.copying import difference
from libra.backends.weights.grid import Grid
from libra.lend.weights.follower import FollowerPlace
from libra.lend.weights.processes import WeightsFollower, WeightsPublisher

_NUMBERS = 32 << 20
_RATE, _DELAY = 6.25e6, 0.02  # 50 Mbit/s: as long for these 67 MB as 10 Gbit/s are for 13 GB
_LEARNING_RATE = 1e-6
_VERSIONS = 5
_NODES = 3  # of each cluster


def measured() -> list[Row]:
    return asyncio.run(_measured())


async def _measured() -> list[Row]:
    grid, weights = Grid(2 * _NUMBERS, "bfloat16"), _versions()
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        memory = stack.enter_context(_memory(grid))
        publisher = await WeightsPublisher.open(grid, memory, "127.0.0.1", 0, logs / "publisher.log")
        stack.push_async_callback(publisher.close)
        link = await stack.enter_async_context(_link(publisher.place.port))
        nodes: list[_Node] = []
        for port in (publisher.place.port, link.port):
            way = WeightsPlace("127.0.0.1", port, publisher.place.token)
            nodes.append(await stack.enter_async_context(_following(grid, way, logs / f"{len(nodes)}.log")))
            way = nodes[-1].place
            for _ in range(_NODES - 1):
                nodes.append(await stack.enter_async_context(_following(grid, way, logs / f"{len(nodes)}.log")))
        seconds, crossed, sizes, computed = list[float](), list[int](), list[int](), list[float]()
        last = next(weights)
        for version in range(_VERSIONS + 1):
            content = next(weights) if version else last
            if version:
                sizes.append(len(difference(last, content)))
            last, before = content, await link.crossed()
            spent = sum(_computed(it) for it in (publisher, *nodes))
            os.pwrite(memory, content.data, version % BUFFERS * grid.size)
            began = time.monotonic()
            publisher.tell(LoadWeights(version, version % BUFFERS, zlib.crc32(content.data)))
            told = await asyncio.gather(*(node.loads(grid, version, content) for node in nodes))
            seconds.append(max(told) - began)
            computed.append(sum(_computed(it) for it in (publisher, *nodes)) - spent)
            crossed.append(await link.crossed() - before)
    full, took, least = seconds[0], median(seconds[1:]), grid.size / _RATE
    whole, most = crossed[0] / grid.size, max(each / one for each, one in zip(crossed[1:], sizes, strict=True))
    case = f"{2 * _NODES} nodes, {8e-6 * _RATE:g} Mbit/s, {1e3 * _DELAY:g} ms"
    return [
        Row(case, "weights", grid.size / 1e6, "MB"),
        Row(case, "everything to all nodes", full, "s"),
        at_most(case, "crossed the link, of everything", whole, "times", 1.05),
        Row(case, "everything at the link's rate", least, "s"),
        Row(case, "a version to all nodes, median", took, "s"),
        Row(case, "a version, CPU time of all processes", median(computed[1:]), "s"),
        at_least(case, "everything over a version", full / took, "x", 15),
        Row(case, "everything at the link's rate, over a version", least / took, "x"),
        Row(case, "a version, of everything", 100 * median(sizes) / grid.size, "% of dense"),
        at_most(case, "crossed the link, of a version, most", most, "times", 1.05),
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
    pipe, options = asyncio.subprocess.PIPE, ("--to", str(port), "--rate", str(_RATE), "--delay", str(_DELAY))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.slow_link", *options, stdin=pipe, stdout=pipe
    )
    try:
        assert process.stdout is not None
        yield _Link(process, json.loads(await process.stdout.readline())["port"])
    finally:
        process.kill()
        await process.wait()


class _Node(WeightsFollower):
    """A follower that others follow, and the memory that it shares with engines."""

    memory: int
    place: WeightsPlace

    async def loads(self, grid: Grid, version: int, content: Vector) -> float:
        """Time at which its engines may load this version, which is checked; then report it as loaded."""
        order = await self.next()
        told = time.monotonic()
        assert order.version == version, order
        found = os.pread(self.memory, len(content), order.buffer * grid.size)
        assert zlib.crc32(found) == order.checksum == zlib.crc32(content.data)
        self.loaded()
        return told


@contextlib.asynccontextmanager
async def _following(grid: Grid, way: WeightsPlace, log: Path) -> AsyncIterator[_Node]:
    with _memory(grid) as memory:
        node = await _Node.open(grid, memory, way, log)
        assert isinstance(node, _Node)
        try:
            word = msgspec.json.decode(await node._read(), type=FollowerPlace)
            node.memory, node.place = memory, WeightsPlace("127.0.0.1", word.port, way.token)
            yield node
        finally:
            await node.close()


@contextlib.contextmanager
def _memory(grid: Grid) -> Iterator[int]:
    memory = os.memfd_create("weights", 0)
    os.ftruncate(memory, BUFFERS * grid.size)
    try:
        yield memory
    finally:
        os.close(memory)


def _computed(node: Any) -> float:
    """Seconds of CPU time so far."""
    spent = psutil.Process(node._process.pid).cpu_times()
    return float(spent.user + spent.system)
