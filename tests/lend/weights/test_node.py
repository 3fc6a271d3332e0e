"""Nodes on real sockets: what arrives is what was published, whatever becomes of the way, and nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import zlib
from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np
import pytest
from fakes.tampering_link import TamperingLink

from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import Vector, WeightUpdateError
from libra.backends.weights.grid import Grid
from libra.lend.weights.feed import Feed
from libra.lend.weights.node import Address, LinkPatience, UpstreamLostError, WeightsNode, served
from libra.lend.weights.source import Source
from libra.lend.weights.wire import Chunk, DamagedError, pack, receive, unrolled

GRID = Grid(20_000, "bfloat16", 1024)
EVERYTHING = np.ones(len(GRID), np.bool_)
PATIENCE = LinkPatience(beat=0.2, silence=5.0, attempts=30, pause=0.001)
TOKEN = "word"


def content_of(version: int, run: int = 0) -> Vector:
    generator = np.random.default_rng(run)
    content = generator.integers(0, 255, GRID.size, dtype=np.uint8)
    for _ in range(version):
        content[generator.integers(0, GRID.size, 400)] += 1
    return content


class Publisher:
    """A trainer's node."""

    def __init__(self, kept_bytes: int | None = None) -> None:
        self.feed = Feed(GRID, EVERYTHING, kept_bytes=kept_bytes)
        self.source = Source(self.feed, "first")
        self.run = 0
        self.address: Address

    async def publish(self, version: int) -> None:
        content = content_of(version, self.run)
        await self.source.publish(version, content, zlib.crc32(content.data))

    def start_again(self) -> None:
        self.run += 1
        self.source = Source(self.feed, f"run {self.run}")


class Node:
    """A node whose engines check what they load."""

    def __init__(
        self, publisher: Publisher, wanted: Sequence[int] | None = None, kept_bytes: int | None = None
    ) -> None:
        self._publisher = publisher
        self.halves = np.zeros(GRID.size, np.uint8), np.zeros(GRID.size, np.uint8)
        mask = None if wanted is None else np.isin(np.arange(len(GRID)), wanted)
        self.node = WeightsNode(GRID, self.halves, self._load, mask, kept_bytes)
        self.loaded: list[int] = []
        self.news = asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.address: Address
        self.following: asyncio.Task[None]

    async def _load(self, order: LoadWeights) -> None:
        await self.may_load.wait()
        half = self.halves[order.buffer]
        assert zlib.crc32(half.data) == order.checksum
        wanted = np.repeat(self.node.mirror.wanted, GRID.chunk_bytes)[: GRID.size]
        assert np.array_equal(half[wanted], content_of(order.version, self._publisher.run)[wanted])
        self.loaded.append(order.version)
        self.news.set()

    async def has(self, version: int) -> None:
        """Wait until engines have loaded this version."""
        while not self.loaded or self.loaded[-1] != version:
            self.news.clear()
            waiting = asyncio.create_task(self.news.wait())
            await asyncio.wait({waiting, self.following}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            if self.following.done():
                self.following.result()
            assert waiting.done(), f"{self.loaded} after 20 s, {version} is waited for"


@contextlib.asynccontextmanager
async def publishing(kept_bytes: int | None = None) -> AsyncIterator[Publisher]:
    publisher = Publisher(kept_bytes)
    async with served(publisher.feed, "127.0.0.1", TOKEN, PATIENCE) as publisher.address:
        yield publisher


@contextlib.asynccontextmanager
async def following(node: Node, *ways: Address, token: str = TOKEN) -> AsyncIterator[Node]:
    """The node follows, and passes on."""
    async with served(node.node.feed, "127.0.0.1", TOKEN, PATIENCE) as node.address:
        node.following = asyncio.create_task(node.node.follow([ways], token, PATIENCE))
        try:
            yield node
        finally:
            node.following.cancel()
            await asyncio.gather(node.following, return_exceptions=True)


def untouched(number: int, frame: bytes) -> list[bytes]:
    return [frame]


async def test_a_cluster_gets_all_versions_over_a_link_that_is_crossed_once() -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        link = await stack.enter_async_context(TamperingLink(publisher.address, untouched).running())
        relay = await stack.enter_async_context(following(Node(publisher), link.address))
        others = [await stack.enter_async_context(following(Node(publisher), relay.address)) for _ in range(2)]
        await publisher.publish(0)
        for node in (relay, *others):
            await node.has(0)
        full = link.bytes
        assert GRID.size < full < 1.2 * GRID.size
        for version in range(1, 6):
            await publisher.publish(version)
            for node in (relay, *others):
                await node.has(version)
        assert link.connections == 1
        assert all(node.node.version == 5 for node in (relay, *others))
        assert sum(len(entry.frame) for entry in publisher.feed.entries()) <= link.bytes - full < 1.2 * GRID.size


class Tamper:
    """Now and then does one thing to a frame that is not the first on its connection."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._random = random.Random(5)
        self._held: bytes | None = None

    def __call__(self, number: int, frame: bytes) -> list[bytes]:
        held, self._held = self._held if number else None, None
        if held is not None:
            return [frame, held]
        if number == 0 or self._random.random() > 0.1:
            return [frame]
        match self._what:
            case "twice":
                return [frame, frame]
            case "out of order":
                self._held = frame
                return []
            case "corrupt":
                place = self._random.randrange(len(frame))
                return [frame[:place] + bytes([frame[place] ^ 0x10]) + frame[place + 1 :]]
            case _:
                return []


TAMPERING = ("twice", "out of order", "corrupt", "missing")


@pytest.mark.parametrize("what", TAMPERING)
@pytest.mark.parametrize("kept_bytes", [0, None])
async def test_what_is_done_to_chunks_on_their_way_is_noticed_and_made_good(what: str, kept_bytes: int | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing(kept_bytes))
        link = await stack.enter_async_context(TamperingLink(publisher.address, Tamper(what)).running())
        relay = await stack.enter_async_context(following(Node(publisher, kept_bytes=kept_bytes), link.address))
        other = await stack.enter_async_context(following(Node(publisher), relay.address))
        for version in range(6):
            await publisher.publish(version)
        await relay.has(5)
        await other.has(5)
        assert relay.loaded == sorted(set(relay.loaded))


async def test_a_link_that_is_cut_goes_on_with_what_did_not_come() -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())

        def breaking(number: int, frame: bytes) -> list[bytes]:
            if number == 7:
                asyncio.get_running_loop().call_soon(link.cut)
            return [frame]

        link = await stack.enter_async_context(TamperingLink(publisher.address, breaking).running())
        node = await stack.enter_async_context(following(Node(publisher), link.address))
        for version in range(4):
            await publisher.publish(version)
        await node.has(3)
        assert link.connections > 3
        assert link.bytes < 4 * GRID.size  # it did not begin from nothing each time


async def test_late_comers_and_those_who_were_away() -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing(1 << 16))
        link = await stack.enter_async_context(TamperingLink(publisher.address, untouched).running())
        relay = await stack.enter_async_context(following(Node(publisher), publisher.address))
        await publisher.publish(0)
        await relay.has(0)
        away = Node(publisher)
        async with following(away, relay.address):
            await away.has(0)
        for version in (1, 2, 3):
            await publisher.publish(version)
            await relay.has(version)
        back = await stack.enter_async_context(following(away, link.address))
        await back.has(3)
        assert link.bytes < GRID.size / 2  # the deltas that it lacks
        late = await stack.enter_async_context(following(Node(publisher), relay.address))
        await late.has(3)
        await publisher.publish(4)
        for node in (relay, back, late):
            await node.has(4)


async def test_a_relay_that_is_gone_is_gone_round() -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        relay = Node(publisher)
        async with following(relay, publisher.address):
            node = await stack.enter_async_context(following(Node(publisher), relay.address, publisher.address))
            await publisher.publish(0)
            await node.has(0)
        await publisher.publish(1)
        await node.has(1)


@pytest.mark.parametrize("kept_bytes", [0, None])
async def test_nobody_waits_for_a_node_that_does_not_load(kept_bytes: int | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing(kept_bytes))
        relay = await stack.enter_async_context(following(Node(publisher, kept_bytes=kept_bytes), publisher.address))
        other = await stack.enter_async_context(following(Node(publisher), relay.address))
        await publisher.publish(0)
        await relay.has(0)
        await other.has(0)
        relay.may_load.clear()
        for version in range(1, 8):
            await publisher.publish(version)  # which would hang
            await other.has(version)
        assert relay.loaded == [0]
        relay.may_load.set()
        await relay.has(7)
        first, *between, last = relay.loaded
        assert (first, last) == (0, 7) and len(between) <= 1  # what was overtaken is left out


async def test_another_run_of_the_trainer_is_not_mixed_with_the_last() -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        relay = await stack.enter_async_context(following(Node(publisher), publisher.address))
        node = await stack.enter_async_context(following(Node(publisher), relay.address))
        for version in (0, 1, 2):
            await publisher.publish(version)
        await relay.has(2)
        await node.has(2)
        publisher.start_again()
        await publisher.publish(1)  # of a checkpoint
        await node.has(1)
        await publisher.publish(2)
        await node.has(2)


async def test_memory_that_was_damaged_is_mended_before_anything_is_loaded() -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        node = await stack.enter_async_context(following(Node(publisher), publisher.address))
        await publisher.publish(0)
        await node.has(0)
        node.halves[node.node.mirror.half][5000] ^= 1  # the base of the next delta
        await publisher.publish(1)
        await node.has(1)


async def test_what_can_never_be_made_right_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        node = await stack.enter_async_context(following(Node(publisher), publisher.address))
        wrong = publisher.source.chunk
        monkeypatch.setattr(publisher.source, "chunk", lambda number: _spoilt(wrong(number)))
        await publisher.publish(0)
        with pytest.raises(WeightUpdateError, match=r"chunk 3 of weights v0: its checksum differs"):
            await node.has(0)


def _spoilt(chunk: Chunk) -> Chunk:
    if chunk.number != 3:
        return chunk
    return Chunk(3, chunk.version, chunk.base, chunk.base_sum, chunk.sum ^ 1, chunk.payload)


async def test_several_senders_with_a_shard_each() -> None:
    async with contextlib.AsyncExitStack() as stack:
        shards = [(0, 8), (8, len(GRID))]
        feeds = [Feed(GRID, np.isin(np.arange(len(GRID)), np.arange(*shard))) for shard in shards]
        sources = [Source(feed, "one", *shard) for feed, shard in zip(feeds, shards, strict=True)]
        places = [await stack.enter_async_context(served(feed, "127.0.0.1", TOKEN, PATIENCE)) for feed in feeds]
        node = Node(Publisher())
        node.following = asyncio.create_task(node.node.follow([[place] for place in places], TOKEN, PATIENCE))
        stack.push_async_callback(lambda: asyncio.gather(node.following, return_exceptions=True))
        stack.callback(node.following.cancel)
        for version in range(3):
            content = content_of(version)
            await sources[0].publish(version, content)
            assert version == 0 or node.loaded[-1] == version - 1
            await sources[1].publish(version, content)
            await node.has(version)


async def test_a_node_asks_for_what_its_engines_read() -> None:
    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(publishing())
        link = await stack.enter_async_context(TamperingLink(publisher.address, untouched).running())
        part = await stack.enter_async_context(following(Node(publisher, wanted=[1, 4, 5]), link.address))
        for version in (0, 1):
            await publisher.publish(version)
            await part.has(version)
        assert link.bytes < 0.3 * GRID.size


async def test_places_that_give_nothing_are_not_asked_for_ever() -> None:
    quick = LinkPatience(beat=0.1, silence=1.0, attempts=3, pause=0.001)
    async with publishing() as publisher:
        for token, way, grid, why in (
            ("wrong", publisher.address, GRID, "the other end closed the connection"),
            (TOKEN, Address("127.0.0.1", 1), GRID, "Connect call failed"),
        ):
            node = WeightsNode(grid, (np.zeros(grid.size, np.uint8), np.zeros(grid.size, np.uint8)), _never)
            with pytest.raises(UpstreamLostError, match=f"no weights after 3 attempts, the last at .*{why}"):
                await node.follow([[way]], token, quick)


async def test_a_node_of_other_weights_is_told_so_at_once() -> None:
    async with publishing() as publisher:
        for grid in (Grid(500, "float32", 1024), msgspec.structs.replace(GRID, layout=42)):
            node = WeightsNode(grid, (np.zeros(grid.size, np.uint8), np.zeros(grid.size, np.uint8)), _never)
            with pytest.raises(UpstreamLostError, match=r"the weights here are Grid\(.*, but Grid\(.* were requested"):
                await node.follow([[publisher.address]], TOKEN, PATIENCE)


async def _never(order: LoadWeights) -> None:
    raise AssertionError("there is nothing to load")


async def test_a_sender_that_says_nothing_is_left() -> None:
    quick = LinkPatience(beat=0.01, silence=0.05, attempts=2, pause=0.001)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    try:
        node = WeightsNode(GRID, (np.zeros(GRID.size, np.uint8), np.zeros(GRID.size, np.uint8)), _never)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        with pytest.raises(UpstreamLostError, match="TimeoutError"):
            await node.follow([[address]], TOKEN, quick)
    finally:
        server.close()


async def test_a_node_that_has_nothing_to_say_says_so() -> None:
    quick = LinkPatience(beat=0.01, silence=0.3, attempts=1, pause=0.0)
    publisher = Publisher()
    async with served(publisher.feed, "127.0.0.1", TOKEN, quick) as address:
        node = Node(publisher)
        node.following = asyncio.create_task(node.node.follow([[address]], TOKEN, quick))
        done, _ = await asyncio.wait({node.following}, timeout=0.6)
        assert not done
        await publisher.publish(0)
        await node.has(0)
        node.following.cancel()
        await asyncio.gather(node.following, return_exceptions=True)


def headed(count: int, body: bytes) -> bytes:
    head = struct.pack("!II", count, zlib.crc32(body))
    return head + struct.pack("!I", zlib.crc32(head)) + body


async def test_frames_that_are_none_are_damage() -> None:
    for frame, why in (
        (headed(1 << 30, b""), "a frame has 1073741824 bytes; at most"),
        (b"\1" + headed(1, b"x")[1:], "the header of a frame arrived damaged"),
        (pack(Chunk(0, 0, 0, 0, 0, b""))[:-1] + b"x", "a frame arrived damaged"),
        (headed(1, b"\xc1"), "is not a message"),
    ):
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        with pytest.raises(DamagedError, match=why):
            await receive(reader, 1.0)


@pytest.mark.parametrize("counted", [[(0, 3)], [(0, 5)], [(0, -1), (0, 5)], []])
def test_runs_of_another_length_are_damage(counted: list[tuple[int, int]]) -> None:
    with pytest.raises(DamagedError, match="chunks are listed, there are 4"):
        unrolled(counted, 4)
