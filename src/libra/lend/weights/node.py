"""A node that keeps weights: the node follows a source or a relay, has its engines load whole versions, and is itself a
relay for other nodes.

Invariant: the node relays a chunk before it uses the chunk, and once to each reader. So a chunk crosses the link to a
cluster once if one node of the cluster follows the source and the others follow that node. `load` gets only versions
that the mirror has checked, and the half of such a version is not written before `load` has returned. Newer chunks then
go to the other half, and no reader waits for this node's engines. The node requests damaged or missing chunks, and
chunks of another base, again: a bounded number of times before `UpstreamLostError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from libra.backends.transport.engine_messages import LoadWeights
from libra.backends.transport.shared_memory import Vector, WeightUpdateError
from libra.backends.weights.grid import Grid, Mask
from libra.config.listeners import WEIGHTS, WeightsLimits
from libra.lend.weights.feed import Feed, FeedReader
from libra.lend.weights.mirror import Mirror
from libra.lend.weights.wire import (
    NOTHING,
    Beat,
    Chunk,
    Complete,
    DamagedError,
    Hello,
    NotServed,
    Welcome,
    pack,
    receive,
    runs,
    unrolled,
)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class LinkPatience:
    """Limits on the time for which one end of a connection waits for the other."""

    beat: float = 2.0  # seconds without news after which a `Beat` is sent
    silence: float = 10.0  # seconds without a byte after which the other end counts as gone
    attempts: int = 8  # attempts in a row without a new item before the source is lost
    pause: float = 0.1  # seconds after the first such attempt; doubled after each further attempt

    def __post_init__(self) -> None:
        if not 0 < self.beat < self.silence or self.attempts < 1 or self.pause < 0:
            raise ValueError(f"{self}: give 0 < beat < silence, attempts of 1 or more, and a pause of 0 or more")


_TURNS = 8  # most turns of the event loop from accepting a connection to reading its first frame
_BACKLOG = 1024  # connections waiting to be accepted
_FAILURES = 8  # undamaged chunks with a wrong result that are requested again, before such a chunk is an error


class UpstreamLostError(ConnectionError):
    """A source of the node, and its relays, no longer send weights."""


# --- the sender ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def served(
    feed: Feed,
    host: str,
    token: str,
    patience: LinkPatience | None = None,
    port: int = 0,
    limits: WeightsLimits = WEIGHTS,
) -> AsyncIterator[Address]:
    """Serve a feed to all readers that send the token; yields the address. Port 0: any free port. If too many
    connections have not sent the token yet, the connection that has waited longest is closed."""
    patience = patience or LinkPatience()
    readers: set[asyncio.Task[None]] = set()
    strangers: dict[asyncio.Task[None], None] = {}  # readers that have not sent the token; longest waiting first

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        readers.add(task)
        strangers[task] = None
        if len(strangers) > limits.strangers:
            longest = next(iter(strangers))
            del strangers[longest]
            longest.cancel()
        try:
            async with _closed(writer):
                hello = await _greeted(reader, token, len(feed.grid), limits)
                strangers.pop(task, None)
                await _serve(feed, hello, patience, writer)
        except (OSError, asyncio.CancelledError):
            pass  # a reader that is alive reconnects; without this, asyncio would log the cancelled handler
        finally:
            readers.discard(task)
            strangers.pop(task, None)

    # So few are accepted at a time that a connection is read before it can be the longest waiting one.
    server = await asyncio.start_server(begin, host, port, backlog=max(1, limits.strangers // _TURNS))
    for each in server.sockets:
        with each.dup() as same:
            same.listen(_BACKLOG)
    address = server.sockets[0].getsockname()
    try:
        yield Address(address[0], address[1])
    finally:
        server.close()
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


@contextlib.asynccontextmanager
async def _closed(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Close the connection at the end and retrieve its error, which asyncio would otherwise log with a trace."""
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _greeted(reader: asyncio.StreamReader, token: str, chunks: int, limits: WeightsLimits) -> Hello:
    """Read a reader's first frame. Raises `OSError` if the frame is too large or too late, or lacks the token."""
    most = limits.hello_bytes + chunks * limits.hello_chunk_bytes
    async with asyncio.timeout(limits.hello_seconds):
        hello, _ = await receive(reader, limits.hello_seconds, most)
    if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), token.encode()):
        raise PermissionError("the token was not sent")
    return hello


async def _serve(feed: Feed, hello: Hello, patience: LinkPatience, writer: asyncio.StreamWriter) -> None:
    if hello.grid != feed.grid:
        writer.write(pack(NotServed(f"the weights here are {feed.grid}, but {hello.grid} were requested")))
        await writer.drain()
        return
    while not feed.lineage:  # the feed has no weights yet
        await _news(feed, patience, writer, NOTHING)
    lineage = feed.lineage
    writer.write(pack(Welcome(lineage, runs(feed.own))))
    have = unrolled(hello.have, len(feed.grid))
    if hello.lineage != lineage:
        have[:] = NOTHING
    to = FeedReader(have, unrolled(hello.wanted, len(feed.grid)).astype(np.bool_))
    while feed.lineage == lineage:
        entry = feed.next(to)
        if entry is None:
            await _news(feed, patience, writer, feed.complete(to))
        else:
            writer.write(entry.frame)
            await writer.drain()


async def _news(feed: Feed, patience: LinkPatience, writer: asyncio.StreamWriter, version: int) -> None:
    """Wait for a change of the feed. Without a change for `beat` seconds, send a `Beat` with the complete `version`."""
    try:
        async with asyncio.timeout(patience.beat):
            await feed.changed()
    except TimeoutError:
        writer.write(pack(Beat(version)))
        await writer.drain()


# --- the receiver ----------------------------------------------------------------------------------------------------


class WeightsNode:
    """A node's mirror and feed, and the loads of its engines. `halves` is the memory from which engines load, `load`
    makes engines load a version, and `wanted` are the chunks that engines read (default: all)."""

    def __init__(
        self,
        grid: Grid,
        halves: tuple[Vector, Vector],
        load: Callable[[LoadWeights], Awaitable[None]],
        wanted: Mask | None = None,
        kept_bytes: int | None = None,
    ) -> None:
        everything = np.ones(len(grid), np.bool_)
        self.mirror = Mirror(grid, halves, everything if wanted is None else wanted)
        self.feed = Feed(grid, self.mirror.wanted, kept_bytes=kept_bytes)
        self._load = load
        self._using = asyncio.Lock()  # guards the mirror
        self._upstream: set[asyncio.StreamWriter] = set()
        self._fruitless: dict[tuple[Address, ...], int] = {}  # by source: attempts in a row without a new item
        self._failures = 0  # failed chunks since the last whole version
        self._ripe = False  # whether another version may be whole
        self.version = NOTHING  # version that was loaded last
        self._begin("")

    async def follow(
        self, sources: Sequence[Sequence[Address]], token: str, patience: LinkPatience | None = None
    ) -> None:
        """Receive all publications until cancelled. Each source has a part of the weights; usually one source has all.
        The addresses of a source are tried in turn: a relay first, then the relay's source. Raises `UpstreamLostError`
        and the errors of `load`."""
        patience = patience or LinkPatience()
        tasks = [asyncio.create_task(self._follow(tuple(ways), token, patience)) for ways in sources]
        tasks.append(asyncio.create_task(self._use()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, ways: tuple[Address, ...], token: str, patience: LinkPatience) -> None:
        self._fruitless[ways] = 0
        why = "no place"
        turn = 0
        while self._fruitless[ways] < patience.attempts:
            if fruitless := self._fruitless[ways]:
                await asyncio.sleep(patience.pause * 2 ** (fruitless - 1))
            self._fruitless[ways] += 1
            place = ways[turn % len(ways)]
            turn += 1
            try:
                async with asyncio.timeout(patience.silence):
                    reader, writer = await asyncio.open_connection(place.host, place.port)
                async with self._asking(writer):
                    await self._receive(ways, token, patience, reader, writer)
            except UpstreamLostError:
                raise
            except OSError as error:
                why = f"{place.host}:{place.port}: {str(error) or type(error).__name__}"
        raise UpstreamLostError(f"no weights after {patience.attempts} attempts, the last at {why}")

    async def _receive(
        self,
        ways: tuple[Address, ...],
        token: str,
        patience: LinkPatience,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Receive until the connection ends, which raises `OSError`."""
        feed, wanted = self.feed, self.mirror.wanted
        writer.write(pack(Hello(token, feed.grid, feed.lineage, runs(feed.newest), runs(wanted))))
        theirs: Mask | None = None
        while True:
            message, frame = await receive(reader, patience.silence)
            match message:
                case Beat():
                    if theirs is not None and np.any(feed.completed[theirs] < message.version):
                        raise DamagedError(f"the sender sent all of v{message.version}, but a part did not arrive")
                    self._fruitless[ways] = 0
                case Welcome():
                    if message.lineage != feed.lineage:
                        async with self._using:
                            self._begin(message.lineage)
                    theirs = wanted & unrolled(message.own, len(feed.grid)).astype(np.bool_)
                case NotServed():
                    raise UpstreamLostError(message.why)
                case Chunk() | Complete() if theirs is not None:
                    self._require_sound(message, theirs)
                    await feed.turn(message, wanted & ~theirs)
                    await feed.room()
                    if feed.add(message, frame):
                        self._fruitless[ways] = 0
                case _:
                    raise DamagedError(f"{type(message).__name__} is not a sender's message")

    def _require_sound(self, item: Chunk | Complete, theirs: Mask) -> None:
        """Raises `DamagedError` if the item is of other weights, or if an item before it is missing."""
        newest = self.feed.newest
        start, stop = (item.number, item.number + 1) if isinstance(item, Chunk) else (item.start, item.stop)
        if not 0 <= start < stop <= len(newest) or item.version < 0:
            raise DamagedError(f"chunks {start} to {stop} of v{item.version} came, but there are {len(newest)} chunks")
        missing = 0
        if isinstance(item, Complete):
            missing = int(np.count_nonzero(theirs[start:stop] & (newest[start:stop] < item.version)))
        elif self.feed.begins(item):
            missing = int(np.count_nonzero(theirs & (newest < newest.max())))
        if missing:
            raise DamagedError(f"{missing} chunks did not come before v{item.version}")

    @contextlib.asynccontextmanager
    async def _asking(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        self._upstream.add(writer)
        async with _closed(writer):
            try:
                yield
            finally:
                self._upstream.discard(writer)
                writer.transport.abort()  # a silent sender may never read the rest of a greeting

    def _ask_again(self, number: int) -> None:
        """Reconnect, so that the senders send an unusable chunk again: whole, or as deltas from the version here."""
        self.feed.lost(number, int(self.mirror.have[number]))
        for writer in self._upstream:
            writer.close()

    def _begin(self, lineage: str) -> None:
        """Forget all earlier weights, and begin with this lineage."""
        self.mirror.forget()
        self.feed.first = FeedReader(self.mirror.have, self.mirror.wanted)
        self.feed.begin(lineage, self.mirror.have)

    async def _use(self) -> None:
        """Apply arriving items, and have engines load whole versions. Chunks that arrive during a load go to the other
        half."""
        feed = self.feed
        loading: asyncio.Task[None] | None = None
        try:
            while True:
                if loading is not None and loading.done():
                    loading.result()
                    loading, self._ripe = None, True
                async with self._using:
                    assert feed.first is not None
                    entry = feed.next(feed.first)
                    if entry is not None:
                        await self._take(entry.item)
                    order = await self._settled() if self._ripe and loading is None else None
                if order is not None:
                    loading = asyncio.create_task(self._have_loaded(order))
                elif entry is None:
                    changed = asyncio.create_task(feed.changed())
                    await asyncio.wait({changed, *([loading] if loading else [])}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
        finally:
            if loading is not None:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)

    async def _take(self, item: Chunk | Complete) -> None:
        mirror = self.mirror
        if isinstance(item, Complete):
            mirror.confirm(item)
            self._ripe = True
            return
        try:
            await asyncio.to_thread(mirror.take, item)
        except WeightUpdateError:
            self._failures += 1
            if self._failures > _FAILURES:
                raise
            self._ask_again(item.number)
        else:
            self._ripe = self._ripe or mirror.is_late(item)

    async def _settled(self) -> LoadWeights | None:
        """The order with which engines load the next version; None: no version to load."""
        mirror, self._ripe = self.mirror, False
        if not mirror.settle():
            return None
        self._failures = 0
        self.feed.stock(mirror)
        if self.feed.completed[mirror.wanted].min() > mirror.held:
            return None  # a newer version has arrived, and will be whole soon
        checksum = mirror.checksum if mirror.wanted.all() else None
        if checksum is None:
            checksum = await asyncio.to_thread(zlib.crc32, mirror.content().data)
        return LoadWeights(mirror.held, mirror.half, checksum)

    async def _have_loaded(self, order: LoadWeights) -> None:
        await self._load(order)
        self.version = order.version
