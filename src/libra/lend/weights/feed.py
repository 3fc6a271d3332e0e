"""A node's feed of weights: stored deltas, and whole chunks for a reader that is too far behind.

Invariant: the feed keeps all deltas of every chunk from version `kept_from` to `newest`. A reader gets each delta once,
or the whole chunk if the reader's version is older than `kept_from`. So a reader that applies everything reaches the
feed's version, from any start. All readers share one copy of the kept bytes. The feed does no I/O; its writer awaits
`room` before it adds an item.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from libra.backends.weights.grid import Grid, Mask, Versions
from libra.lend.weights.wire import NOTHING, Chunk, Complete, Kept, pack, runs

# Most bytes of kept deltas, as a share of the weights' size. A reader that is further behind gets whole chunks, which
# are not much larger than the deltas that it lacks.
_KEPT_SHARE = 0.25


class Store(Protocol):
    """Source of whole chunks."""

    @property
    def versions(self) -> Versions:
        """Version of each chunk; `NOTHING` for a chunk that the store lacks."""
        ...

    def chunk(self, number: int) -> Chunk:
        """The whole chunk `number`, which the store must have."""
        ...


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """One kept item, and its frame."""

    item: Kept
    frame: bytes


class FeedReader:
    """Progress of one reader: the last version of each chunk that it got, and its position among the kept items."""

    def __init__(self, have: Versions, wanted: Mask) -> None:
        self.have, self.wanted = have, wanted
        self.place = 0  # number of the next entry, counted from the feed's first entry ever
        self.stock: object = None  # the feed's `_stock` for which `owed` was computed
        self.owed: deque[int] = deque()  # chunks that the reader has to get whole
        self.untold: deque[Complete] | None = None  # messages that follow the whole chunks; None: not made yet


class Feed:
    """The kept items of one node, and the readers' next frames. `lineage` distinguishes the versions of one run from
    those of another; a follower uses the lineage of its source."""

    def __init__(self, grid: Grid, own: Mask, lineage: str = "", kept_bytes: int | None = None) -> None:
        self.grid, self.own = grid, own
        self.kept_bytes = int(_KEPT_SHARE * grid.size) if kept_bytes is None else kept_bytes
        self.first: FeedReader | None = None  # the node's own mirror: entries are kept until it has read them
        self._store: Store | None = None
        self._stock = object()  # replaced whenever the chunks of the store change
        self._changed = asyncio.Event()
        self.begin(lineage, np.full(len(grid), NOTHING, np.int64))

    def begin(self, lineage: str, newest: Versions) -> None:
        """Drop all items, and continue from the versions `newest` of `lineage`."""
        self.lineage = lineage
        self.newest, self.kept_from = newest.copy(), newest.copy()
        self.completed = np.full(len(self.grid), NOTHING, np.int64)
        self._checksum: tuple[int, int | None] = (NOTHING, None)  # of the latest version that is complete
        self._entries: deque[KeptFrame] = deque()
        self._dropped = 0  # entries that are no longer kept
        self._bytes = 0
        self.stock(None)

    def stock(self, store: Store | None) -> None:
        """Set the source of whole chunks, or note that its chunks have changed."""
        self._store, self._stock = store, object()
        self._announce()

    @property
    def kept(self) -> int:
        """Total bytes of the kept frames."""
        return self._bytes

    def entries(self) -> tuple[KeptFrame, ...]:
        """All kept items, oldest first."""
        return tuple(self._entries)

    def add(self, item: Kept, frame: bytes) -> bool:
        """Keep an item that follows the kept items. False: the item is a duplicate, or its predecessor is missing."""
        if isinstance(item, Chunk):
            newest = self.newest[item.number]
            if item.version <= newest or not (item.whole or item.base == newest):
                return False
            self.newest[item.number] = item.version
            if item.whole:
                self.kept_from[item.number] = item.version
        else:
            span = slice(item.start, item.stop)
            if np.all(self.completed[span] >= item.version):
                return False
            self.completed[span] = np.maximum(self.completed[span], item.version)
            self._checksum = max(self._checksum, (item.version, item.checksum), key=lambda told: told[0])
        self._entries.append(KeptFrame(item, frame))
        self._bytes += len(frame)
        self._drop()
        self._announce()
        return True

    def lost(self, number: int, have: int) -> None:
        """Record that the node's own mirror could not use a chunk. The feed continues from the mirror's version `have`.

        A reader that needs an older version gets the whole chunk."""
        self.newest[number] = have
        self.kept_from[number] = max(self.kept_from[number], have)
        if self.first is not None:
            self.first.have[number] = have
        self._announce()

    def next(self, reader: FeedReader) -> KeptFrame | None:
        """The next frame for the reader, which is then counted as received; None: no frame is left."""
        if reader.place < self._dropped:
            reader.place, reader.stock = self._dropped, None
        if reader.stock is not self._stock and self._store is not None:
            lacking = reader.wanted & self.own & (reader.have < self.kept_from) & (self._store.versions > reader.have)
            reader.owed = deque(np.flatnonzero(lacking).tolist())
            reader.stock, reader.untold = self._stock, None
        entry = self._whole(reader)
        while entry is None and reader.place - self._dropped < len(self._entries):
            kept = self._entries[reader.place - self._dropped]
            reader.place += 1
            if self._is_news(kept.item, reader):
                entry = kept
        if entry is not None and isinstance(entry.item, Chunk):
            reader.have[entry.item.number] = entry.item.version
        if reader is self.first:
            self._drop()
        return entry

    def complete(self, reader: FeedReader) -> int:
        """The latest version that is complete in all chunks that the reader wants and can get here, and that the reader
        has got."""
        given = np.minimum(reader.have, self.completed)[self.own & reader.wanted]
        return int(given.min(initial=self.completed.max()))

    def _whole(self, reader: FeedReader) -> KeptFrame | None:
        """The next whole chunk for the reader, where deltas no longer reach back to its version. After the last whole
        chunk, messages about the version that these chunks complete."""
        if self._store is None:
            return None
        while reader.owed:
            chunk = self._store.chunk(reader.owed.popleft())
            if chunk.version > reader.have[chunk.number]:
                return KeptFrame(chunk, pack(chunk))
        if reader.untold is None:
            reader.untold = deque(self._complete(reader))
        if reader.untold:
            told = reader.untold.popleft()
            return KeptFrame(told, pack(told))
        return None

    def _complete(self, reader: FeedReader) -> Iterator[Complete]:
        """Messages that a version is complete, if the reader has that version of all chunks it can get here. Otherwise
        deltas of the version are still to come, and kept messages follow them."""
        version = int(self.completed[self.own].min())
        if version == NOTHING or np.any(reader.have[self.own & reader.wanted] < version):
            return
        checksum = self._checksum[1] if self._checksum[0] == version else None
        start = 0
        for own, count in runs(self.own):
            if own:
                yield Complete(version, start, start + count, checksum)
            start += count

    def _is_news(self, item: Kept, reader: FeedReader) -> bool:
        if isinstance(item, Complete):
            return True
        have = reader.have[item.number]
        return bool(reader.wanted[item.number]) and item.version > have and (item.whole or item.base == have)

    def changed(self) -> Coroutine[None, None, bool]:
        """Wait for the next change after this call."""
        return self._changed.wait()

    async def room(self) -> None:
        """Wait until at most `kept_bytes` are kept, for which the node's own mirror must have read its items. Slow
        remote readers are not waited for; they get whole chunks."""
        while self._bytes > self.kept_bytes and self.first is not None and self.first.place <= self._dropped:
            await self.changed()

    async def turn(self, item: Kept, others: Mask) -> None:
        """Wait, before `item` begins a version, until the chunks of other senders have reached the newest version.
        Otherwise a mirror might never have one version everywhere."""
        while self.begins(item) and np.any(self.newest[others] < self.newest.max()):
            await self.changed()

    def begins(self, item: Kept) -> bool:
        """Whether `item` is the first kept item of a version."""
        return isinstance(item, Chunk) and not item.whole and item.version > self.newest.max()

    def _drop(self) -> None:
        """Forget the oldest items that the node's own mirror has read, down to `kept_bytes`."""
        before = self._dropped
        while self._bytes > self.kept_bytes and (self.first is None or self._dropped < self.first.place):
            entry = self._entries.popleft()
            self._dropped += 1
            self._bytes -= len(entry.frame)
            if isinstance(entry.item, Chunk):
                number = entry.item.number
                self.kept_from[number] = max(self.kept_from[number], entry.item.version)
        if self._dropped != before:
            self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
