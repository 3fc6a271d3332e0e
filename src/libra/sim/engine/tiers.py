"""KV offloaded from the GPU, and loads of KV that the GPU's own cache lacks.

Invariant: the answer of a lookup changes only if a transfer ends, or if the engine reuses a block that a transfer still
reads or that was found for a waiting request. Until then, iterations may be counted together. For a chunk that is being
written or loaded, the answer is to ask again later. A block that a store still reads is not overwritten before the
store has ended. The rules are those of vLLM's `OffloadingConnector`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from libra.sim.engine.block_pool import BlockPool
from libra.sim.engine.block_run import Block, Run
from libra.sim.engine.chunk_cache import Access, Key, Presence
from libra.sim.engine.kv_tier import KVTier
from libra.sim.engine.request import Owner, Path, Request, owner_of
from libra.sim.engine.tier_fetches import TierFetches, too_small
from libra.sim.engine.tier_transfers import Offload, Shelf, TierTransfers


@dataclass(slots=True, eq=False)
class Use:
    """The accesses and stores of a request in the tiers, from its first lookup to its end."""

    access: Access = field(default_factory=Access)
    stored: int = 0  # number of chunks of its context that are stored or being stored
    stores: list[Offload] = field(default_factory=list)
    over: bool = False

    def until(self, now: int) -> int:
        """The tick at which the last store of the request has ended; `now` if all have ended."""
        self.stores = [it for it in self.stores if not it.ended(now)]
        return max((it.end for it in self.stores if it.end is not None), default=now)


class Tiers:
    """The tiers of one engine, the nearest first."""

    def __init__(self, tiers: Sequence[KVTier], pool: BlockPool, *, volatile: bool = False) -> None:
        """With `volatile`, the last known chunk may still change while its request generates."""
        self.transfers = TierTransfers(tiers)
        self.fetches = TierFetches(self.transfers)
        self.first = self.transfers.first
        self.prompt_only = tiers[0].offload_prompt_only
        self.shared = any(tier.shared for tier in tiers)
        self.now = 0  # tick of the latest boundary
        self.failed: dict[Request, None] = {}  # running requests with chunks that did not fit into the first tier
        self.watched: list[tuple[Request, int]] = []  # waiting requests, and the blocks found for each
        self.patient = False  # no waiting request needs another lookup before something changes
        self._pool = pool
        self._last_changes = volatile
        self._reads = pool.reads
        self._uses: dict[Request, Use] = {}
        self._ended: list[tuple[Request, Offload | None]] = []  # requests ended since the last schedule; last stores
        # Transfers of this schedule
        self._loads: list[tuple[Request, list[Key], int]] = []  # (request, chunks, blocks)
        self._promotions: dict[Shelf, dict[Request, list[Key]]] = {}
        self._stores: list[Offload] = []
        self._flushed = 0  # tick until which iterations wait for stores

    @property
    def blocks_per_chunk(self) -> int:
        return self.first.tier.blocks_per_chunk

    def restless(self, now: int) -> bool:
        """Whether an iteration that begins now has to do more in the tiers than store the chunks that it fills."""
        failed = self.failed and self.prompt_only
        return bool(self._ended or self._reads.given or failed) or self._flushed > now

    @property
    def stirred(self) -> bool:
        """Whether this schedule has begun a transfer that may change the lookups of other requests."""
        return bool(self._loads or self._promotions or self._stores)

    def rest(self, waiting: Collection[Request]) -> None:
        """Check requests that wait while nothing is computed. Raises ValueError if they evict each other's chunks from
        the first tier for ever."""
        accesses = {request: self._uses[request].access for request in waiting if request in self._uses}
        if self.fetches.repeat(accesses, self.now):
            size = self.blocks_per_chunk * self._pool.block_size
            contexts = ((it.path, (it.prompt_tokens + it.generated) // size) for it in waiting)
            chunks = {key for path, count in contexts for key in self._keys(path, 0, count)}
            raise too_small(self.transfers, self.fetches.requests, len(chunks))

    # Time

    def settle(self, now: int) -> list[Request]:
        """Handle the transfers that have ended by `now`. Returns the requests whose KV has arrived."""
        self.now = now
        arrived = self.transfers.arrived(now)
        self._reads.settle(now)
        return arrived

    def next_event(self) -> int | None:
        """The tick at which the next transfer ends for which a request waits; None: no request waits for one."""
        watching = self.watched or self.failed
        return self.transfers.next_end() if watching else self.transfers.next_load()

    def quiet(self, most: int) -> int:
        """Free blocks, at most `most`, that are reused before a block that a transfer still reads or a lookup found."""
        if not (self.watched or self._reads.reading):
            return most
        found: dict[Owner, int] = {}
        for request, blocks in self.watched:
            for owner, start, end in request.path:
                if start < blocks:
                    found[owner] = max(found.get(owner, 0), min(end, blocks))
        return self._pool.given_before(found, most)

    # A schedule

    def begin(self) -> None:
        """Begin a schedule, and forget the lookups of the last one."""
        self.watched, self.patient = [], False

    def look(self, request: Request, tokens: int, found: int) -> int | None:
        """Tokens that can be loaded after the first `found` ones of a context of `tokens` tokens; None: ask again
        later."""
        use = self._uses.setdefault(request, Use())
        if use.until(self.now) > self.now:
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
        if self._last_changes:
            hits.pop()
        tokens = (start + len(hits)) * size - found
        if tokens < size:
            return 0
        return None if any(key in self.transfers.coming for key in hits) else tokens

    def load(self, request: Request, found: int, tokens: int) -> None:
        """Load `tokens` tokens after the first `found` ones of a request, into blocks that it has taken already."""
        size = self.blocks_per_chunk * self._pool.block_size
        use = self._uses[request]
        use.stored = (found + tokens) // size
        keys = self._keys(request.path, found // size, use.stored)
        self.first.cache.begin_read(keys, use.access)
        self.transfers.coming.update(keys)
        self._loads.append((request, keys, tokens // self._pool.block_size))
        self.transfers.loading[request] = -1
        self.touch(request, found // self._pool.block_size)

    def touch(self, request: Request, blocks: int) -> None:
        """Let the next iteration wait for stores that still read the first `blocks` blocks of a request's context."""
        pool, path = self._pool, request.path
        for block, stores in self._reads.reading.items():
            if not isinstance(block, tuple) or block[1] >= blocks or owner_of(path, block[1]) is not block[0]:
                continue
            if pool.block_of(request, *block) == block:  # not a further copy
                self._reads.given[block] = stores

    def conclude(self, rows: Iterable[tuple[Request, int]], preempted: Iterable[Request], now: int) -> int:
        """End a schedule. `rows` has the requests of its iteration, and for each the known tokens that have KV at the
        iteration's end. Returns the ticks until the iteration can begin, because stores that read blocks which it
        overwrites end first."""
        given, begin, begun = self._reads.given, max(now, self._flushed), self.transfers.begun
        for request in preempted:
            self.failed.pop(request, None)
            begin = max(begin, self._uses[request].until(now))
        begin = max([begin, *(it.end for stores in given.values() for it in stores if it.end is not None)])
        for request, known in rows:
            self.store(request, known)
        ended, self._ended = self._ended, []
        for request, last in ended:
            if last is not None and self._store_last(last, self._uses[request]):
                begin = max(begin, self.transfers.store(last, now))
        for request, _ in ended:
            access = self._uses.pop(request).access
            for shelf in self.transfers.shelves:
                shelf.cache.end_access(access)
        for request, keys, blocks in self._loads:
            self.transfers.load(request, keys, blocks, begin)
        for shelf, of_request in self._promotions.items():
            for keys in of_request.values():
                self.transfers.promote(keys, shelf, self.now)
        if self._stores or self.transfers.begun > begun:
            self.transfers.disturb(self.now)
        self._loads, self._promotions = [], {}
        self._reads.given = {}
        self._flushed = begin
        return begin - now

    def send(self, now: int) -> None:
        """Begin the stores of an iteration's KV, at its end `now`."""
        stores, self._stores = self._stores, []
        for store in stores:
            self.transfers.store(store, now)

    def end(self, request: Request, computed: int) -> None:
        """Record that a request ends, before its blocks are released. They have the KV of `computed` tokens."""
        use = self._uses.get(request)
        if use is None or use.over:
            return
        use.over = True
        use.until(self.now)
        for store in use.stores:
            self._fence(request, store)
        last = None
        self.failed.pop(request, None)
        chunks = self._chunks(request, computed)
        if chunks > use.stored:
            last = Offload(self._keys(request.path, use.stored, chunks))
            self._fence(request, last)
        self._ended.append((request, last))

    def full_at(self, request: Request) -> int:
        """Number of known tokens at which a running request has one more full chunk to store."""
        return (self._uses[request].stored + 1 + self._last_changes) * self.blocks_per_chunk * self._pool.block_size

    def store(self, request: Request, known: int) -> None:
        """Store the chunks of a running request that are full now."""
        use = self._uses[request]
        chunks = self._chunks(request, known)
        if self._last_changes and known > request.prompt_tokens and not self.prompt_only:
            chunks -= 1
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
        """Store the remaining chunks of a request. Returns True if the store begins at once, since the blocks are
        reused."""
        given = self._reads.given
        new = self.first.cache.begin_write(store.keys, use.access) or []
        for key in set(store.keys).difference(new):
            for block in store.blocks[key]:
                self._reads.drop(block, store)
        store.keys = new
        at_once = any(store in given.get(block, ()) for key in new for block in store.blocks[key])
        if new and not at_once:
            self._stores.append(store)
        return at_once

    def _fence(self, request: Request, store: Offload) -> None:
        """Let the request that next gets a block of `request` wait for `store`, which still reads the block."""
        size, reads = self.blocks_per_chunk, self._reads
        for key in store.keys:
            chunk = range(key[1] * size, (key[1] + 1) * size)
            blocks: list[Block] = []
            for number in chunk:
                if number < request.written:
                    blocks.append(self._pool.block_of(request, owner_of(request.path, number), number))
                else:
                    block = Run(None, number, number + 1, 0)
                    reads.unwritten.setdefault(request, []).append((number, block))
                    blocks.append(block)
            store.blocks[key] = blocks
            for read in blocks:
                reads.begin(read, store)

    def _chunks(self, request: Request, known: int) -> int:
        """Number of chunks of a request that may be stored, with `known` known tokens."""
        if self.prompt_only and known > request.prompt_tokens:
            known = request.prompt_tokens
        return known // (self.blocks_per_chunk * self._pool.block_size)

    def _presence(self, key: Key, request: Request, use: Use) -> Presence:
        """Whether a chunk is in the first tier. A chunk that is only in another tier is fetched from there."""
        presence = self.first.cache.presence(key)
        if presence != "missing":
            return presence
        for shelf in self.transfers.others:
            if shelf.cache.presence(key) == "there":
                if not self.first.cache.begin_write([key], use.access):
                    return "missing"
                shelf.cache.begin_read([key], Access())
                self.fetches.note(request, key)
                self._promotions.setdefault(shelf, {}).setdefault(request, []).append(key)
                return "pending"
        return "missing"

    def _keys(self, path: Path, start: int, end: int) -> list[Key]:
        """Keys of the chunks from `start` to `end` (exclusive) of a context."""
        size = self.blocks_per_chunk
        return [(owner_of(path, (chunk + 1) * size - 1), chunk) for chunk in range(start, end)]
