"""Source of weights on a trainer's node, which publishes each version as deltas from the version before.

Invariant: the source calls a version complete only if the version matches the trainer's checksum. The source keeps its
own copy of the last publication, so it does not depend on memory that a trainer may overwrite. Trainers do not wait for
the source: a slow source is late, or reports that a publication was overwritten.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np

from libra.backends.transport.shared_memory import Vector, WeightUpdateError
from libra.backends.weights import delta
from libra.backends.weights.grid import Sums, Versions
from libra.lend.weights.feed import Feed
from libra.lend.weights.wire import NOTHING, Chunk, Complete, pack


class Source:
    """Fills a feed with the chunks from `start` to before `stop`, with `threads` threads. Its trainer has all weights,
    or one shard of them. The source is also the feed's store."""

    def __init__(self, feed: Feed, lineage: str, start: int = 0, stop: int | None = None, threads: int = 1) -> None:
        grid = feed.grid
        self._feed, self._lineage = feed, lineage
        self._start, self._stop = start, len(grid) if stop is None else stop
        if not 0 <= self._start < self._stop <= len(grid):
            raise ValueError(f"chunks from {self._start} to {self._stop}: give 0 <= start < stop <= {len(grid)}")
        self._content: Vector = np.zeros(grid.size, np.uint8)  # untouched pages of other shards take no memory
        self._sums: Sums = np.zeros(len(grid), np.uint32)
        self._pool = ThreadPoolExecutor(threads, "encode")  # numpy and zlib release the interpreter
        self._ahead = 2 * threads  # chunks that are encoded ahead
        self._changing = Lock()  # guards each chunk's content, version and sum
        self.versions: Versions = np.full(len(grid), NOTHING, np.int64)

    def chunk(self, number: int) -> Chunk:
        with self._changing:
            content = self._held(number).tobytes()
            return Chunk(number, int(self.versions[number]), NOTHING, 0, int(self._sums[number]), content)

    async def publish(self, version: int, content: Vector, checksum: int | None = None) -> None:
        """Publish a version. `content` is the memory of all weights, and `checksum` their CRC-32 if this source has all
        chunks. Raises `WeightUpdateError` if the memory had other weights or was overwritten: the publication is then
        invalid, and a source with a new lineage must replace this source."""
        loop, first, running = asyncio.get_running_loop(), self.versions[self._start] == NOTHING, 0
        ahead: deque[asyncio.Future[Chunk]] = deque()
        for number in range(self._start, self._stop + self._ahead):
            if number < self._stop:
                ahead.append(loop.run_in_executor(self._pool, self._take, version, number, content))
            if number < self._start + self._ahead or not ahead:
                continue
            chunk = await ahead.popleft()
            running = zlib.crc32(self._held(chunk.number).view(np.uint8).data, running)
            if not first:
                self._feed.add(chunk, pack(chunk))
        if checksum is not None and running != checksum:
            raise WeightUpdateError(f"weights v{version} are gone: checksum {running:#010x}, expected {checksum:#010x}")
        if first:
            self._feed.begin(self._lineage, self.versions)
            self._feed.stock(self)
        complete = Complete(version, self._start, self._stop, checksum)
        self._feed.add(complete, pack(complete))

    def _take(self, version: int, number: int, content: Vector) -> Chunk:
        """Copy a chunk, which the trainer may overwrite at any moment. Returns its delta from the previous copy, or the
        whole chunk if that is shorter."""
        held, new = self._held(number), self._feed.grid.numbers(content, number).copy()
        data = new.view(np.uint8).data
        before, base = int(self._sums[number]), int(self.versions[number])
        payload = delta.encode(held, new) if base != NOTHING else b""
        checksum = zlib.crc32(data)
        if base != NOTHING and len(payload) >= len(data):
            base, before, payload = NOTHING, 0, bytes(data)
        with self._changing:
            np.copyto(held, new)
            self._sums[number], self.versions[number] = checksum, version
        return Chunk(number, version, base, before, checksum, payload)

    def _held(self, number: int) -> delta.Numbers:
        return self._feed.grid.numbers(self._content, number)
