"""A CPU slot: a device of fixed speed on a machine without accelerators.

Invariant: over any stretch longer than `BURST`, a paced process uses at most `share` of one core, whether its
neighbours are idle or busy. Without this an idle slot would give its time away and moving it would mean nothing.

Two slots of half a core live on one core. A slot's share is a little less than one half: the rest of the core is for
the controller and the operating system, so that a busy neighbour takes nothing from a slot.
"""

from __future__ import annotations

import os
import time

BURST = 0.02  # seconds of CPU time that an idle slot may save up: a few engine iterations


class Pacer:
    """Call `pace()` between pieces of work (engine iterations, micro-batches); it sleeps what the slot owes."""

    def __init__(self, share: float, cores: tuple[int, ...]) -> None:
        if not 0 < share <= len(cores):
            raise ValueError(f"share {share}: expected more than 0 and at most the {len(cores)} core(s) of the slot")
        os.sched_setaffinity(0, cores)
        self._share = share
        self._cpu, self._wall = time.process_time(), time.monotonic()
        self._debt = 0.0  # seconds of CPU time used beyond the share

    def pace(self) -> None:
        self._account()
        if self._debt > 0 and self._share < 1:
            time.sleep(self._debt / self._share)
            self._account()

    def _account(self) -> None:
        cpu, wall = time.process_time(), time.monotonic()
        self._debt += (cpu - self._cpu) - self._share * (wall - self._wall)
        self._debt = max(self._debt, -BURST)
        self._cpu, self._wall = cpu, wall
