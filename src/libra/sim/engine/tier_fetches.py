"""What requests that wait fetch into the first tier from others, and whether that ever ends.

Invariant: nothing is refused that could go on by itself: only where nothing is computed, somebody fetches again what
another one pushed out, and all is as it was before. vLLM's scheduler goes on with that for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from libra.sim.engine.chunk_cache import Access, Key
from libra.sim.engine.request import Request
from libra.sim.engine.tier_transfers import TierTransfers


class TierTooSmallError(ValueError):
    """Requests push each other's chunks out of the first tier, for ever."""


class TierFetches:
    """Those of one engine since it computed anything."""

    def __init__(self, transfers: TierTransfers) -> None:
        self._transfers = transfers
        self._fetched: set[tuple[Request, Key]] = set()
        self._again = False  # something was fetched a second time
        self._states: set[Hashable] = set()  # in which that was so

    @property
    def requests(self) -> list[int]:
        """The numbers of those that fetch."""
        return sorted({request.number for request, _ in self._fetched})

    def note(self, request: Request, key: Key) -> None:
        """A request fetches a chunk."""
        self._again = self._again or (request, key) in self._fetched
        self._fetched.add((request, key))

    def forget(self) -> None:
        """An iteration is computed."""
        if self._fetched:
            self._fetched, self._again, self._states = set(), False, set()

    def repeat(self, waiting: Mapping[Request, Access], now: int) -> bool:
        """Nothing is computed, and these wait: whether all is as it was before."""
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
    """Of the first tier: so many chunks would do."""
    shelf = transfers.first
    return TierTooSmallError(
        f"kv_tiers: {shelf.tier.name} is too small, {shelf.tier.chunks} chunks: requests"
        f" {', '.join(map(str, requests))} fetch what they need into it and push each other's chunks out, for ever;"
        f" give it room for those of all that wait, {chunks} chunks ({chunks * shelf.chunk_bytes / 2**30:.3g} GiB)"
    )
