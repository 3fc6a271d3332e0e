"""Links that transfers share, such as the networks of engines.

Invariant: a transfer goes over the links of both its ends. Each link divides its bandwidth evenly among its transfers
at any moment; a transfer gets the smaller of its two shares. Times are whole ticks, and bytes are counted in small
whole parts, so results do not depend on the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from libra.sim.clock import TICKS

_PARTS = 1 << 32  # parts of a byte; a link of 1 GB/s sends 4 million parts in a tick


@dataclass(slots=True, eq=False)
class Link:
    """One direction of an engine's network, in parts of bytes a tick."""

    rate: int
    transfers: dict[Transfer, None] = field(default_factory=dict)
    share: int = 0  # rate of each transfer
    moved: int = 0  # bytes of all transfers that have ended

    def divide(self) -> None:
        """Compute the share of each transfer, after a transfer has begun or ended."""
        self.share = max(1, self.rate // max(1, len(self.transfers)))


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer in flight. `left` is the rest at tick `since`."""

    key: Hashable
    links: tuple[Link, Link]
    size: int
    left: int  # parts
    since: int
    rate: int = 0  # parts a tick
    end: int = 0  # tick, if nothing changes


class Network:
    """Transfers in flight. `passed` is called at the end of each interval in which a transfer had one rate, with the
    transfer and the tick; the interval began at `Transfer.since`."""

    __slots__ = ("_ends", "_passed", "_serial", "_transfers")

    def __init__(self, passed: Callable[[Transfer, int], None] | None = None) -> None:
        self._passed = passed
        self._transfers: dict[Hashable, Transfer] = {}
        self._ends: list[tuple[int, int, Transfer]] = []  # a heap, with some outdated ends
        self._serial = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._transfers

    def begin(self, key: Hashable, source: Link, target: Link, size: int, now: int) -> None:
        """Send `size` >= 1 bytes from now on."""
        transfer = Transfer(key, (source, target), size, size * _PARTS, now)
        self._transfers[key] = transfer
        source.transfers[transfer] = target.transfers[transfer] = None
        self._share_anew(transfer, now)

    def drop(self, key: Hashable, now: int) -> None:
        """Abort a transfer."""
        self._leave(self._transfers.pop(key), now)

    def next_end(self) -> int | None:
        """The tick at which the next transfer ends if no transfer begins earlier; None without transfers."""
        ends = self._ends
        while ends:
            tick, _, transfer = ends[0]
            if transfer.end == tick:
                return tick
            heappop(ends)
        return None

    def ended(self, now: int) -> list[Hashable]:
        """Remove and return the transfers that have ended by `now`, in the order of their ends."""
        done: list[Hashable] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            tick, _, transfer = heappop(ends)
            if transfer.end != tick:
                continue
            del self._transfers[transfer.key]
            for link in transfer.links:
                link.moved += transfer.size
            self._leave(transfer, now)
            done.append(transfer.key)
        return done

    def _leave(self, transfer: Transfer, now: int) -> None:
        if self._passed is not None:
            self._passed(transfer, now)
        for link in transfer.links:
            del link.transfers[transfer]
        transfer.end = -1
        self._share_anew(transfer, now)

    def _share_anew(self, changed: Transfer, now: int) -> None:
        """Compute the rates of all transfers that share a link with `changed`, which has begun or ended."""
        source, target = changed.links
        source.divide()
        target.divide()
        for link in changed.links:
            for transfer in link.transfers:
                one, other = transfer.links
                rate = one.share if one.share < other.share else other.share
                if rate == transfer.rate:
                    continue
                if self._passed is not None:
                    self._passed(transfer, now)
                transfer.left = max(0, transfer.left - (now - transfer.since) * transfer.rate)
                transfer.since, transfer.rate = now, rate
                transfer.end = now + -(-transfer.left // rate)
                self._serial += 1
                heappush(self._ends, (transfer.end, self._serial, transfer))


def link(bandwidth: float) -> Link:
    """A link of `bandwidth` bytes/s."""
    numerator, denominator = float(bandwidth).as_integer_ratio()
    return Link(max(1, numerator * _PARTS // (denominator * TICKS)))
