"""A link that transfers share: a node's network, a PCIe lane, the path from prefill to decode.

Invariant: the link sends one transfer at a time, in the order of the requests, and is idle only when none waits.
"""

from __future__ import annotations

import math

from libra.sim.clock import TICKS, ticks


class Link:
    """First come, first served: a transfer has the whole bandwidth once those before it are through.

    Real links interleave transfers that are under way together and give each a share. Neither order is idle while
    bytes wait, so both have the same busy periods, and the last completion in each is the same. What differs is who
    waits inside a busy period: here those who asked later, so that a small transfer behind a large one ends later than
    with fair shares. In return a completion is known when it is asked for, and no later request moves it.

    `bandwidth` is bytes/s of one direction, `latency` seconds from the last byte's sending to its arrival. The latency
    passes outside the link: the next transfer is sent meanwhile. Raises ValueError where a number is no rate or no
    duration.
    """

    __slots__ = ("_bytes_per_tick", "_latest", "busy_ticks", "busy_until", "bytes_moved", "latency")

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        if not (math.isfinite(bandwidth) and bandwidth > 0):
            raise ValueError(f"bandwidth is {bandwidth} bytes/s; give a finite number above 0")
        numerator, denominator = float(bandwidth).as_integer_ratio()
        self._bytes_per_tick = (numerator, denominator * TICKS)  # as a fraction: whole numbers stay exact at any size
        self.latency = ticks(latency)
        self.reset()

    def reset(self) -> None:
        """Idle, at tick 0: another simulation begins."""
        self._latest = 0
        self.busy_until = 0  # tick at which everything asked for so far is sent
        self.bytes_moved = 0
        self.busy_ticks = 0  # to send these bytes, what is not sent yet included

    def sending_ticks(self, size: int) -> int:
        """Ticks that `size` bytes occupy the link, rounded up. Raises ValueError for a negative size."""
        if size < 0:
            raise ValueError(f"a transfer of {size} bytes; sizes are 0 or more")
        numerator, denominator = self._bytes_per_tick
        return -(-size * denominator // numerator)

    def send(self, now: int, size: int) -> int:
        """Ask at tick `now` for `size` bytes to be sent; the tick at which the last of them has arrived.

        Raises ValueError where `now` is before an earlier request: that one's completion was promised already.
        """
        if now < self._latest:
            raise ValueError(
                f"a transfer asked for at tick {now}, after one at tick {self._latest}: ask in order of time"
            )
        duration = self.sending_ticks(size)
        self._latest = now
        self.busy_until = max(now, self.busy_until) + duration
        self.bytes_moved += size
        self.busy_ticks += duration
        return self.busy_until + self.latency
