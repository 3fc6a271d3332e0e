"""KV beside the GPU: chunks that are stored as they fill, and loaded where the GPU's own cache lacks them.

Invariant: nothing here changes but with time and at the boundaries at which an engine decides, so iterations may be
counted together. A chunk that is still written, or that is being loaded already, means "ask again"; a block that is
still read by a store is not overwritten before that has ended. The rules are those of vLLM's `OffloadingConnector`, and
with several tiers of its `TieringOffloadingManager`: all goes through the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from libra.sim.engine.block_pool import Block, BlockPool
from libra.sim.engine.chunk_cache import Access, ChunkCache, Key, Presence, chunk_cache
from libra.sim.engine.kv_tier import Channel, KVTier
from libra.sim.engine.request import Path, Request, owner_of


class Shelf:
    """A tier as one engine has it: what is in it, and the links to it and from it."""

    __slots__ = ("cache", "into", "loaded", "loads", "out", "stored", "tier")

    def __init__(self, tier: KVTier) -> None:
        self.tier = tier
        self.cache: ChunkCache = chunk_cache(tier.chunks, tier.policy)
        self.into, self.out = Channel(tier.store_bandwidth, tier.latency), Channel(tier.load_bandwidth, tier.latency)
        self.loads = 0  # by this engine, and the bytes of both directions
        self.loaded = self.stored = 0.0

    @property
    def chunk_bytes(self) -> float:
        return self.tier.blocks_per_chunk * self.tier.block_bytes

    def store(self, size: float, now: int) -> int:
        """Bytes go to it. Returns the tick at which they are there."""
        self.stored += size
        return self.into.send(size, now)

    def load(self, size: float, now: int) -> int:
        self.loads += 1
        self.loaded += size
        return self.out.send(size, now)


@dataclass(slots=True, eq=False)
class Offload:
    """Chunks on their way to the first tier. It reads the blocks until it has ended."""

    keys: list[Key]
    end: int | None = None  # tick; None: it has not begun
    blocks: dict[Key, list[Block]] = field(default_factory=dict)  # that it reads, of a request that has ended


@dataclass(slots=True, eq=False)
class Use:
    """What a request has to do with the tiers, from its first look to its end."""

    access: Access = field(default_factory=Access)
    stored: int = 0  # chunks of its context that are there, or on their way
    stores: list[Offload] = field(default_factory=list)
    over: bool = False

    def until(self, now: int) -> int:
        """When the last of its stores has ended."""
        self.stores = [it for it in self.stores if it.end is None or it.end > now]
        return max((it.end for it in self.stores if it.end is not None), default=now)


@dataclass(slots=True, eq=False)
class TierTransfer:
    """Under way, other than a store."""

    keys: list[Key]
    shelf: Shelf  # where to, or where from
    kind: Literal["load", "copy", "promotion"]  # to the GPU; from the first tier to another; from that to the first
    request: Request | None = None


class Tiers:
    """Those of one engine, the nearest first."""

    def __init__(self, tiers: Sequence[KVTier], pool: BlockPool) -> None:
        self.shelves = [Shelf(tier) for tier in tiers]
        self.first, self.others = self.shelves[0], self.shelves[1:]
        self.prompt_only = tiers[0].offload_prompt_only
        self.shared = any(tier.shared for tier in tiers)
        self.loading: dict[Request, int] = {}  # tick at which the KV is there
        self.failed: dict[Request, None] = {}  # running, with chunks that did not fit
        self.deferred = False  # a request that waits is to be asked again
        self.users = [self]  # the engines that share a tier, in their order
        self._pool = pool
        self._uses: dict[Request, Use] = {}
        self._ended: list[tuple[Request, Offload | None]] = []  # since the last schedule; what they could not store
        self._coming: set[Key] = set()  # chunks that are being loaded
        self._loads: list[tuple[Request, list[Key], int]] = []  # of this schedule, and how many blocks
        self._promotions: dict[Shelf, dict[Request, list[Key]]] = {}  # the same
        self._stores: list[Offload] = []  # the same
        self._ends: list[tuple[int, int, Offload | TierTransfer]] = []  # of all that is under way
        self._serial = 0
        self._arrived: list[Request] = []

    @property
    def blocks_per_chunk(self) -> int:
        return self.first.tier.blocks_per_chunk

    @property
    def restless(self) -> bool:
        """Whether the next iteration has to be looked at by itself."""
        return bool(self.deferred or self.failed or self._ended or self._pool.reading)

    # Time

    def settle(self, now: int) -> list[Request]:
        """What has ended by now has. Returns the requests whose KV has come."""
        self.pass_time(now)
        reading = self._pool.reading
        if reading:
            self._pool.reading = {block: it for block, it in reading.items() if it.end is None or it.end > now}
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            del self.loading[request]
        return arrived

    def pass_time(self, now: int) -> None:
        """The same, but nobody looks at what has come."""
        users = self.users
        while True:
            ends = [(end, place) for place, it in enumerate(users) if (end := it.first_end) is not None and end <= now]
            if not ends:
                return
            users[min(ends)[1]].end_first()

    def next_load(self) -> int | None:
        """The tick at which KV of a request is there next."""
        return min(self.loading.values(), default=None)

    def end_first(self) -> None:
        """Let the next of what is under way end."""
        end, _, what = heappop(self._ends)
        first = self.first.cache
        if isinstance(what, Offload):
            first.end_write(what.keys)
            for shelf in self.others:
                new = shelf.cache.begin_write(what.keys, Access())
                if new:
                    first.begin_read(new, Access())
                    self._under_way(shelf.store(len(new) * shelf.chunk_bytes, end), TierTransfer(new, shelf, "copy"))
        elif what.kind == "load":
            first.end_read(what.keys)
            self._coming.difference_update(what.keys)
            assert what.request is not None
            self._arrived.append(what.request)
        elif what.kind == "copy":
            first.end_read(what.keys)
            what.shelf.cache.end_write(what.keys)
        else:
            first.end_write(what.keys)
            what.shelf.cache.end_read(what.keys)

    def _under_way(self, end: int, what: Offload | TierTransfer) -> None:
        self._serial += 1
        heappush(self._ends, (end, self._serial, what))

    @property
    def first_end(self) -> int | None:
        """When something that this engine began ends next."""
        return self._ends[0][0] if self._ends else None

    def next_end(self) -> int | None:
        """The same of all engines that share a tier with it."""
        return min((end for it in self.users if (end := it.first_end) is not None), default=None)

    # A schedule

    def look(self, request: Request, tokens: int, found: int, now: int) -> int | None:
        """Tokens after the first `found` ones that can be loaded of a context of so many; None: ask again."""
        use = self._uses.setdefault(request, Use())
        if use.until(now) > now:
            return None
        size = self.blocks_per_chunk * self._pool.block_size
        chunks = tokens // size
        if chunks * size - found < size:
            return 0
        start = found // size
        hits: list[Key] = []
        later = False
        for key in self._keys(request.path, start, chunks):
            presence = self._presence(key, request, use)
            if presence == "missing":
                break
            later = later or presence == "pending"
            hits.append(key)
        if not hits:
            return 0
        if later:
            return None
        tokens = (start + len(hits)) * size - found
        if tokens < size:
            return 0
        return None if any(key in self._coming for key in hits) else tokens

    def load(self, request: Request, found: int, tokens: int) -> None:
        """Load so many tokens after the first `found` ones; there are blocks for them."""
        size = self.blocks_per_chunk * self._pool.block_size
        use = self._uses[request]
        use.stored = (found + tokens) // size
        keys = self._keys(request.path, found // size, use.stored)
        self.first.cache.begin_read(keys, use.access)
        self._coming.update(keys)
        self._loads.append((request, keys, tokens // self._pool.block_size))
        self.loading[request] = -1
        self.touch(request.path, found // self._pool.block_size)

    def touch(self, path: Path, blocks: int) -> None:
        """The first blocks of a context are given to a request, also if others had them before."""
        pool = self._pool
        for block, store in pool.reading.items():
            if isinstance(block, tuple) and block[1] < blocks and owner_of(path, block[1]) is block[0]:
                pool.given[block] = store

    def conclude(self, rows: Iterable[tuple[Request, int]], preempted: Iterable[Request], now: int) -> int:
        """The end of a schedule, whose requests have computed so many tokens with it. Returns the ticks until its
        iteration can begin: stores whose blocks are overwritten end first."""
        given, begin = self._pool.given, now
        for request in preempted:
            self.failed.pop(request, None)
            begin = max(begin, self._uses[request].until(now))
        begin = max([begin, *(store.end for store in given.values() if store.end is not None)])
        for request, computed in rows:
            self.store(request, computed)
        ended, self._ended = self._ended, []
        for request, last in ended:
            if last is not None and self._store_last(last, self._uses[request]):
                begin = max(begin, self._send(last, now))
        for request, _ in ended:
            access = self._uses.pop(request).access
            for shelf in self.shelves:
                shelf.cache.end_access(access)
        self._begin_loads(begin, now)
        self._pool.given = {}
        return begin - now

    def send(self, now: int) -> None:
        """The iteration ends then: stores of what it computes begin."""
        stores, self._stores = self._stores, []
        for store in stores:
            self._send(store, now)

    def end(self, request: Request, computed: int, now: int) -> None:
        """A request ends; of so many tokens its blocks have the KV, which it lets go of after this."""
        use = self._uses.get(request)
        if use is None or use.over:
            return
        use.over = True
        use.until(now)
        for store in use.stores:
            self._fence(request, store)
        last = None
        if request in self.failed:
            del self.failed[request]
            last = Offload(self._keys(request.path, use.stored, self._chunks(request, computed)))
            self._fence(request, last)
        self._ended.append((request, last))

    def _begin_loads(self, begin: int, now: int) -> None:
        for request, keys, blocks in self._loads:
            self.loading[request] = end = self.first.load(blocks * self.first.tier.block_bytes, begin)
            self._under_way(end, TierTransfer(keys, self.first, "load", request))
        for shelf, of_request in self._promotions.items():
            for keys in of_request.values():
                end = shelf.load(len(keys) * shelf.chunk_bytes, now)
                self._under_way(end, TierTransfer(keys, shelf, "promotion"))
        self._loads, self._promotions = [], {}

    def _send(self, store: Offload, now: int) -> int:
        end = self.first.store(len(store.keys) * self.first.chunk_bytes, now)
        store.end = end
        self._under_way(end, store)
        return end

    def filled_after(self, request: Request, computed: int) -> int:
        """Tokens more until a running request has a chunk to be stored, 1 at least."""
        chunk = self.blocks_per_chunk * self._pool.block_size
        return max(1, (self._uses[request].stored + 1) * chunk - computed)

    def store(self, request: Request, computed: int) -> None:
        """Store the chunks of a running request that are full now."""
        use = self._uses[request]
        chunks = self._chunks(request, computed)
        self.failed.pop(request, None)
        if chunks <= use.stored:
            return
        new = self.first.cache.begin_write(self._keys(request.path, use.stored, chunks), use.access)
        if new is None:
            self.failed[request] = None
            return
        use.stored = chunks
        if new:
            store = Offload(new)
            use.stores.append(store)
            self._stores.append(store)

    def _store_last(self, store: Offload, use: Use) -> bool:
        """Store what did not fit while its request ran. True: at once, for its blocks are given to others."""
        reading, given = self._pool.reading, self._pool.given
        new = self.first.cache.begin_write(store.keys, use.access) or []
        for key in set(store.keys).difference(new):
            for block in store.blocks[key]:
                if reading.get(block) is store:
                    del reading[block]
        store.keys = new
        at_once = any(given.get(block) is store for key in new for block in store.blocks[key])
        if new and not at_once:
            self._stores.append(store)
        return at_once

    def _fence(self, request: Request, store: Offload) -> None:
        """Whoever is given a block that a store reads waits for it."""
        size, pool = self.blocks_per_chunk, self._pool
        for key in store.keys:
            chunk = range(key[1] * size, (key[1] + 1) * size)
            blocks = [pool.block_of(request, owner_of(request.path, it), it) for it in chunk]
            store.blocks[key] = blocks
            for block in blocks:
                pool.reading[block] = store

    def _chunks(self, request: Request, computed: int) -> int:
        """Chunks of a request that may be stored."""
        if self.prompt_only and computed > request.prompt_tokens:
            computed = request.prompt_tokens
        return computed // (self.blocks_per_chunk * self._pool.block_size)

    def _presence(self, key: Key, request: Request, use: Use) -> Presence:
        """Whether a chunk is in the first tier; from another one it is fetched."""
        presence = self.first.cache.presence(key)
        if presence != "missing":
            return presence
        for shelf in self.others:
            if shelf.cache.presence(key) == "there":
                if not self.first.cache.begin_write([key], use.access):
                    return "missing"
                shelf.cache.begin_read([key], Access())
                self._promotions.setdefault(shelf, {}).setdefault(request, []).append(key)
                return "pending"
        return "missing"

    def _keys(self, path: Path, start: int, end: int) -> list[Key]:
        """Of the chunks from one to another of a context."""
        size = self.blocks_per_chunk
        return [(owner_of(path, (chunk + 1) * size - 1), chunk) for chunk in range(start, end)]


class SharedTiers:
    """What the engines of a cluster share: the contents of a tier, and with the engines of its node its link."""

    def __init__(self) -> None:
        self._first: dict[str, Shelf] = {}
        self._links: dict[tuple[str, str], tuple[Channel, Channel]] = {}
        self._users: list[Tiers] = []

    def join(self, tiers: Tiers, node: str) -> None:
        """An engine comes. Raises ValueError where its tier is not what others have under that name."""
        for shelf in tiers.shelves:
            name = shelf.tier.name
            if not shelf.tier.shared:
                continue
            first = self._first.setdefault(name, shelf)
            if first.tier != shelf.tier:
                raise ValueError(f"kv_tiers: {name} is shared, and not alike on all engines: give each the same")
            shelf.cache = first.cache
            shelf.into, shelf.out = self._links.setdefault((name, node), (shelf.into, shelf.out))
            if tiers.users is not self._users:
                tiers.users = self._users
                self._users.append(tiers)
