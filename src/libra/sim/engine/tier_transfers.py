"""KV transfers between an engine's GPU and its tiers, and between tiers, and their ends.

Invariant: ends are handled in the order of their ticks over all engines that share a tier, whichever engine checks
first. So results do not depend on how often an engine checks. Several tiers follow vLLM's `TieringOffloadingManager`:
all chunks go through the first tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from libra.sim.engine.block_run import Block
from libra.sim.engine.chunk_cache import Access, ChunkCache, Key, chunk_cache
from libra.sim.engine.kv_tier import Channel, KVTier
from libra.sim.engine.request import Request


class Shelf:
    """One engine's view of a tier: its contents, and the links to and from it."""

    __slots__ = ("cache", "into", "loaded", "loads", "out", "stored", "tier")

    def __init__(self, tier: KVTier) -> None:
        self.tier = tier
        self.cache: ChunkCache = chunk_cache(tier.chunks, tier.policy)
        self.into, self.out = Channel(tier.store_bandwidth, tier.latency), Channel(tier.load_bandwidth, tier.latency)
        self.loads = 0  # number of loads by this engine
        self.loaded = self.stored = 0.0  # bytes loaded and stored by this engine

    @property
    def chunk_bytes(self) -> float:
        return self.tier.blocks_per_chunk * self.tier.block_bytes

    def store(self, size: float, now: int) -> int:
        """Send `size` bytes to the tier. Returns the tick of their arrival."""
        self.stored += size
        return self.into.send(size, now)

    def load(self, size: float, now: int) -> int:
        self.loads += 1
        self.loaded += size
        return self.out.send(size, now)


@dataclass(slots=True, eq=False)
class Offload:
    """A store of chunks to the first tier, which reads their blocks until it has ended."""

    keys: list[Key]
    end: int | None = None  # tick; None: it has not begun
    blocks: dict[Key, list[Block]] = field(default_factory=dict)  # blocks that it reads, if its request has ended

    def ended(self, now: int) -> bool:
        return self.end is not None and self.end <= now


@dataclass(slots=True, eq=False)
class TierTransfer:
    """A transfer in flight other than a store."""

    keys: list[Key]
    shelf: Shelf  # the source; for a copy the destination
    # "load": to the GPU; "copy": from the first tier to another tier; "promotion": from another tier to the first
    kind: Literal["load", "copy", "promotion"]
    request: Request | None = None


class TierTransfers:
    """The transfers of one engine. `shelves` are its tiers, the nearest first."""

    def __init__(self, tiers: Sequence[KVTier]) -> None:
        self.shelves = [Shelf(tier) for tier in tiers]
        self.first, self.others = self.shelves[0], self.shelves[1:]
        self.sharing = [self]  # the engines that share a tier, in their order
        self.loading: dict[Request, int] = {}  # tick at which the request's KV has arrived
        self.coming: set[Key] = set()  # chunks that are being loaded
        self.begun = 0
        self.look_at: Callable[[int], object] | None = None  # makes its engine plan from a tick on
        self._ends: list[tuple[int, int, Offload | TierTransfer]] = []  # all transfers under way, by their end
        self._arrived: list[Request] = []

    # Begins

    def store(self, what: Offload, now: int) -> int:
        what.end = self.first.store(len(what.keys) * self.first.chunk_bytes, now)
        self._begin(what.end, what)
        return what.end

    def load(self, request: Request, keys: list[Key], blocks: int, now: int) -> None:
        """Load chunks into `blocks` blocks of the GPU."""
        self.loading[request] = end = self.first.load(blocks * self.first.tier.block_bytes, now)
        self._begin(end, TierTransfer(keys, self.first, "load", request))

    def promote(self, keys: list[Key], shelf: Shelf, now: int) -> None:
        """Fetch chunks from the tier of `shelf` into the first tier."""
        self._begin(shelf.load(len(keys) * shelf.chunk_bytes, now), TierTransfer(keys, shelf, "promotion"))

    def disturb(self, now: int) -> None:
        """Let the other engines that share a tier plan again, since their lookups may now find other chunks. At one
        tick, engines plan in their order."""
        place = self.sharing.index(self)
        for number, it in enumerate(self.sharing):
            if number != place and it.look_at is not None:
                it.look_at(now + (number < place))

    def _begin(self, end: int, what: Offload | TierTransfer) -> None:
        self.begun += 1
        heappush(self._ends, (end, self.begun, what))

    # Ends

    def arrived(self, now: int) -> list[Request]:
        """The requests whose KV has arrived since the last call."""
        self.pass_time(now)
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            del self.loading[request]
        return arrived

    def pass_time(self, now: int) -> None:
        """Handle the transfers that end up to `now`, of all engines that share a tier."""
        sharing = self.sharing
        while True:
            ends = [(it._ends[0][0], place) for place, it in enumerate(sharing) if it._ends and it._ends[0][0] <= now]
            if not ends:
                return
            sharing[min(ends)[1]]._end_first()

    def next_load(self) -> int | None:
        """The tick at which the next load ends; None: no load is in flight."""
        return min(self.loading.values(), default=None)

    def next_end(self) -> int | None:
        """The tick at which the next transfer ends, including transfers of engines that share a tier; None: no transfer
        is in flight."""
        return min((it._ends[0][0] for it in self.sharing if it._ends), default=None)

    def under_way(self, now: int) -> tuple[tuple[int, ...], ...]:
        """Ticks until each transfer in flight ends, for each engine that shares a tier."""
        return tuple(tuple(sorted(end - now for end, *_ in it._ends)) for it in self.sharing)

    def _end_first(self) -> None:
        end, _, what = heappop(self._ends)
        first = self.first.cache
        if isinstance(what, Offload):
            first.end_write(what.keys)
            for shelf in self.others:
                new = shelf.cache.begin_write(what.keys, Access())
                if new:
                    first.begin_read(new, Access())
                    self._begin(shelf.store(len(new) * shelf.chunk_bytes, end), TierTransfer(new, shelf, "copy"))
        elif what.kind == "load":
            first.end_read(what.keys)
            self.coming.difference_update(what.keys)
            assert what.request is not None
            self._arrived.append(what.request)
        elif what.kind == "copy":
            first.end_read(what.keys)
            what.shelf.cache.end_write(what.keys)
        else:
            first.end_write(what.keys)
            what.shelf.cache.end_read(what.keys)


class SharedTiers:
    """Tiers that the engines of a cluster share. All engines share the contents; engines on one node share the link."""

    def __init__(self) -> None:
        self._first: dict[str, Shelf] = {}
        self._links: dict[tuple[str, str], tuple[Channel, Channel]] = {}
        self._sharing: list[TierTransfers] = []

    def join(self, transfers: TierTransfers, node: str) -> None:
        """Add an engine on `node`. Raises ValueError if other engines use a shared tier's name with other values."""
        for shelf in transfers.shelves:
            name = shelf.tier.name
            if not shelf.tier.shared:
                continue
            first = self._first.setdefault(name, shelf)
            if first.tier != shelf.tier:
                raise ValueError(f"kv_tiers: {name} is shared, and differs between engines: give each the same")
            shelf.cache = first.cache
            shelf.into, shelf.out = self._links.setdefault((name, node), (shelf.into, shelf.out))
            if transfers.sharing is not self._sharing:
                transfers.sharing = self._sharing
                self._sharing.append(transfers)
