"""Common duties of worker processes: end with the parent, report the last error, and stay within the slot's share.

A CPU slot emulates a device of fixed speed on a machine without accelerators. Invariant: over any time longer than
`BURST`, a paced process uses at most `share` of one core, whether its neighbours are idle or busy. Otherwise an idle
slot would speed up its neighbours, and moving a slot would have no effect. Two slots share a core. The share is a
little less than one half, which leaves the rest of the core to the controller and the operating system. So a busy
neighbour does not slow a slot down.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from libra.backends.transport.messages import Failure, Message

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
BURST = 0.02  # seconds of CPU time that an idle slot can save up: a few engine iterations


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def serve_and_leave(serve: Callable[[], None], send: Callable[[Message], None]) -> NoReturn:
    """Serve, report an error if one is raised, and exit without the parent's clean-up handlers."""
    status = 0
    try:
        serve()
    except ConnectionError:
        pass  # the other end is closed, so there is nothing left to serve
    except Exception as error:  # noqa: BLE001 - the process boundary: every error becomes a message and a log entry
        traceback.print_exc()
        status = 1
        try:
            send(Failure(f"{type(error).__name__}: {error}"))
        except OSError:
            pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Pacer:
    """Limits a process to its slot's share. Call `pace()` between pieces of work (engine iterations, micro-batches); it
    sleeps until the slot is within its share again."""

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
