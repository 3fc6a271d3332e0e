"""Fetches of waiting requests from other tiers into the first one, and the check that they end.

Invariant: a run that could proceed is never refused. A run is refused only if nothing is computed, a request fetches a
chunk again that another request evicted, and the state equals an earlier one. There vLLM's scheduler would repeat the
fetches for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from libra.sim.engine.chunk_cache import Access, Key
from libra.sim.engine.request import Request
from libra.sim.engine.tier_transfers import TierTransfers


class TierTooSmallError(ValueError):
    """Requests evict each other's chunks from the first tier for ever."""


class TierFetches:
    """The fetches of one engine since its latest iteration."""

    def __init__(self, transfers: TierTransfers) -> None:
        self._transfers = transfers
        self._fetched: set[tuple[Request, Key]] = set()
        self._again = False  # a request has fetched a chunk a second time
        self._states: set[Hashable] = set()  # states after a chunk was fetched a second time

    @property
    def requests(self) -> list[int]:
        """The numbers of the requests that have fetched chunks, in rising order."""
        return sorted({request.number for request, _ in self._fetched})

    def note(self, request: Request, key: Key) -> None:
        """Record that a request fetches a chunk."""
        self._again = self._again or (request, key) in self._fetched
        self._fetched.add((request, key))

    def forget(self) -> None:
        """Forget all fetches, since an iteration is computed."""
        if self._fetched:
            self._fetched, self._again, self._states = set(), False, set()

    def repeat(self, waiting: Mapping[Request, Access], now: int) -> bool:
        """Whether the state equals an earlier one. Called while nothing is computed and all `waiting` requests wait."""
        if not self._again:
            return False
        self._again = False
        first = self._transfers.first.cache
        counts = tuple((len(it.seen), len(it.inserted), len(it.missed)) for it in waiting.values())  # they only grow
        state = (tuple(waiting), first.order(), self._transfers.under_way(now), counts)
        known = state in self._states
        self._states.add(state)
        return known


def too_small(transfers: TierTransfers, requests: Collection[int], chunks: int) -> TierTooSmallError:
    """The error for a first tier that is too small: `chunks` chunks would suffice."""
    shelf = transfers.first
    return TierTooSmallError(
        f"kv_tiers: {shelf.tier.name} is too small, {shelf.tier.chunks} chunks: requests"
        f" {', '.join(map(str, requests))} fetch their chunks into it and evict each other's for ever; give it room"
        f" for the chunks of all waiting requests, {chunks} chunks ({chunks * shelf.chunk_bytes / 2**30:.3g} GiB)"
    )
