"""The KV chunks in a tier, and the order in which they are evicted.

Invariant: a chunk that is being written or read is never evicted. Either all chunks of a write are stored or none. The
rules are those of vLLM's `CPUOffloadingManager` with its policies `lru` and `arc`. The chunks of a request count as
used once, at the request's end, last chunk first, so a prefix outlives its continuation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from libra.sim.engine.request import Owner

Key = tuple[Owner, int]  # owner of a chunk's last tokens, and the chunk's place in its context
CachePolicy = Literal["lru", "arc"]
Presence = Literal["missing", "pending", "there"]


@dataclass(slots=True, eq=False)
class KVChunk:
    pending: bool = True  # whether the chunk is still being written
    readers: int = 0

    @property
    def idle(self) -> bool:
        return not self.pending and not self.readers


@dataclass(slots=True, eq=False)
class Access:
    """Chunks that one request has used, by kind of use."""

    seen: set[Key] = field(default_factory=set)
    inserted: set[Key] = field(default_factory=set)
    reused: set[Key] = field(default_factory=set)
    missed: set[Key] = field(default_factory=set)


class ChunkCache(ABC):
    """Cache with room for `chunks` chunks."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.held = 0
        self.idle = 0  # number of held chunks that can be evicted

    def presence(self, key: Key) -> Presence:
        chunk = self._get(key)
        return "missing" if chunk is None else "pending" if chunk.pending else "there"

    def begin_read(self, keys: Sequence[Key], access: Access) -> None:
        """Begin to read present chunks, which stay until the read has ended."""
        for key in keys:
            chunk = self._chunk(key)
            self.idle -= chunk.idle
            chunk.readers += 1
        access.seen.update(keys)
        access.reused.update(key for key in keys if key not in access.inserted)

    def end_read(self, keys: Iterable[Key]) -> None:
        for key in keys:
            chunk = self._chunk(key)
            chunk.readers -= 1
            self.idle += chunk.idle

    def begin_write(self, keys: Sequence[Key], access: Access) -> list[Key] | None:
        """Begin to write those of these chunks that are missing, and return them. None: too few other chunks can be
        evicted."""
        found = {key: chunk for key in keys if (chunk := self._get(key)) is not None}
        new = [key for key in keys if key not in found]
        missed = [key for key in new if key not in access.missed]
        if missed:
            self._miss(missed)
            access.missed.update(missed)
        there = [key for key, chunk in found.items() if not chunk.pending]
        access.seen.update(new, there)
        access.reused.update(key for key in there if key not in access.inserted)
        excess = self.held + len(new) - self.chunks
        if new and excess > 0:
            victims = self._victims(excess, set(keys)) if excess <= self.idle else None
            if victims is None:
                return None
            self.idle -= excess
            self.held -= excess
        for key in new:
            self._insert(key, KVChunk())
        self.held += len(new)
        access.inserted.update(new)
        return new

    def end_write(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._chunk(key).pending = False
            self.idle += 1

    def end_access(self, access: Access) -> None:
        """Count the accesses of an ended request as one use."""
        self._use(sorted(access.seen, key=lambda key: -key[1]), access)

    @abstractmethod
    def order(self) -> tuple[Hashable, ...]:
        """The state that determines the order of eviction."""

    def _chunk(self, key: Key) -> KVChunk:
        chunk = self._get(key)
        assert chunk is not None
        return chunk

    @abstractmethod
    def _get(self, key: Key) -> KVChunk | None: ...

    @abstractmethod
    def _insert(self, key: Key, chunk: KVChunk) -> None: ...

    @abstractmethod
    def _miss(self, keys: Sequence[Key]) -> None:
        """Record that a request wants to write missing chunks."""

    @abstractmethod
    def _use(self, keys: Sequence[Key], access: Access) -> None:
        """Record that a request that used `keys` has ended. The last chunks of its context are first in `keys`."""

    @abstractmethod
    def _victims(self, count: int, spared: Collection[Key]) -> list[Key] | None:
        """Evict `count` idle chunks that are not `spared`. None: there are fewer, so no chunk is evicted."""


class LruCache(ChunkCache):
    """Evicts the least recently used chunk first."""

    def __init__(self, chunks: int) -> None:
        super().__init__(chunks)
        self._order: OrderedDict[Key, KVChunk] = OrderedDict()

    def order(self) -> tuple[Hashable, ...]:
        return tuple(_told(self._order))

    def _get(self, key: Key) -> KVChunk | None:
        return self._order.get(key)

    def _insert(self, key: Key, chunk: KVChunk) -> None:
        self._order[key] = chunk

    def _miss(self, keys: Sequence[Key]) -> None:
        return

    def _use(self, keys: Sequence[Key], access: Access) -> None:
        for key in keys:
            if key in self._order:
                self._order.move_to_end(key)

    def _victims(self, count: int, spared: Collection[Key]) -> list[Key] | None:
        victims = list(islice(_idle(self._order, spared), count))
        if len(victims) < count:
            return None
        for key in victims:
            del self._order[key]
        return victims


class ArcCache(ChunkCache):
    """Adaptive replacement (Megiddo and Modha 2003): a queue of chunks used once, and a queue of chunks used more
    often. Recently evicted chunks show which of the two queues has too little room."""

    def __init__(self, chunks: int) -> None:
        super().__init__(chunks)
        self._once: OrderedDict[Key, KVChunk] = OrderedDict()
        self._often: OrderedDict[Key, KVChunk] = OrderedDict()
        self._gone_once: OrderedDict[Key, None] = OrderedDict()
        self._gone_often: OrderedDict[Key, None] = OrderedDict()
        self._room = 0.0  # target size of the queue of chunks used once

    def order(self) -> tuple[Hashable, ...]:
        queues = tuple(_told(self._once)), tuple(_told(self._often)), tuple(self._gone_once), tuple(self._gone_often)
        return (*queues, self._room)

    def _get(self, key: Key) -> KVChunk | None:
        return self._once.get(key) or self._often.get(key)

    def _insert(self, key: Key, chunk: KVChunk) -> None:
        self._once[key] = chunk
        self._gone_once.pop(key, None)
        self._gone_often.pop(key, None)

    def _miss(self, keys: Sequence[Key]) -> None:
        once, often = self._gone_once, self._gone_often
        for key in reversed(keys):
            if key in once:
                self._room = min(self._room + max(1, len(often) / len(once)), self.chunks)
                once.move_to_end(key)
            elif key in often:
                self._room = max(self._room - max(1, len(once) / len(often)), 0)
                often.move_to_end(key)

    def _use(self, keys: Sequence[Key], access: Access) -> None:
        for key in keys:
            if key in access.inserted and key not in access.reused:
                queue = self._once if key in self._once else self._often
                if key in queue:
                    queue.move_to_end(key)
            elif key in access.reused and key in self._once:
                self._often[key] = self._once.pop(key)
            elif key in access.reused and key in self._often:
                self._often.move_to_end(key)

    def _victims(self, count: int, spared: Collection[Key]) -> list[Key] | None:
        once, often, left = _idle(self._once, spared), _idle(self._often, spared), len(self._once)
        victims: list[tuple[Key, bool]] = []
        for _ in range(count):
            key = next(once, None) if left >= int(self._room) else None
            if key is None:
                key = next(often, None)
                if key is not None:
                    victims.append((key, False))
                    continue
                key = next(once, None)
                if key is None:
                    return None
            left -= 1
            victims.append((key, True))
        for key, was_once in victims:
            del (self._once if was_once else self._often)[key]
            (self._gone_once if was_once else self._gone_often)[key] = None
        for gone in (self._gone_once, self._gone_often):
            while len(gone) > self.chunks:
                gone.popitem(last=False)
        return [key for key, _ in victims]


def chunk_cache(chunks: int, policy: CachePolicy) -> ChunkCache:
    return LruCache(chunks) if policy == "lru" else ArcCache(chunks)


def _idle(queue: OrderedDict[Key, KVChunk], spared: Collection[Key]) -> Iterator[Key]:
    return (key for key, chunk in queue.items() if chunk.idle and key not in spared)


def _told(queue: OrderedDict[Key, KVChunk]) -> Iterator[tuple[Key, bool, int]]:
    return ((key, chunk.pending, chunk.readers) for key, chunk in queue.items())
