"""The serving engine's side of a lent device, which takes the device for a step and then releases it.

Invariant: serving never waits for a borrower longer than the current grant. The lock alone cannot guarantee this: when
a borrower is killed, the kernel frees the lock only after it has removed the process. So the end of a grant is written
before the grant begins. After this end, serving continues without the lock, and reports a new epoch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from libra.lend.backend.device_page import POLL, DevicePage, EngineFacts, ServingNotice, ServingStep
from libra.lend.gate import IDLE, ServingView
from libra.lend.quota import KVView

_PICKUP = 0.001  # seconds for a borrower to take the device while serving can spare it
_LONGEST_WAIT = 5.0  # most seconds of waiting for the end of a grant, whatever the page says


class ServingToken:
    """Serving's view of the device page. Creates the file if it does not exist. A new server takes over the page of an
    earlier server, whose borrower continues."""

    def __init__(
        self, path: Path, about: EngineFacts | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._page, self._clock, self._pid = DevicePage(path, create=True), clock, os.getpid()
        if about is not None:
            self._page.facts = about
        self._wants = self._held = self._nobody = False
        self.lent = False  # whether the device was lent before the current step
        self.fenced = 0
        self.publish(IDLE, KVView(), self.pace)

    @property
    def pace(self) -> float:
        """Seconds per token to which the borrower may slow serving down; 0: no borrower has set a pace yet."""
        return self._page.fields.pace

    @property
    def expires(self) -> float:
        """End of the last grant."""
        return self._page.fields.expires

    @property
    def leased(self) -> bool:
        """Whether the lender's word is valid."""
        lease = self._page.fields.lease
        return lease > 0 and lease > self._clock()

    @property
    def kv_asked(self) -> int:
        """Bytes of KV that the borrower requests."""
        return 0 if self._gone() else self._page.fields.kv_asked

    @property
    def kv_held(self) -> int:
        """Bytes of ceded KV that the borrower has now."""
        return 0 if self._gone() else self._page.fields.kv_held

    @property
    def due(self) -> float:
        """Time at which the next token is due, as last published; inf: none is due, or no borrower has set a pace."""
        view, _, pace = self._said
        return view.due if pace > 0 else math.inf

    def publish(self, view: ServingView, kv: KVView, pace: float) -> None:
        self._said = view, kv, pace
        self._write()

    def publish_view(self, view: ServingView) -> None:
        """Publish this view of the requests, and the rest unchanged."""
        _, kv, pace = self._said
        self.publish(view, kv, pace)

    def publish_kv(self, kv: KVView) -> None:
        """Publish this view of the memory, and the rest unchanged."""
        view, _, pace = self._said
        self.publish(view, kv, pace)

    def acquire(self) -> bool:
        """Take the device. False: the device was lent meanwhile, and serving still has time to spare; the caller
        publishes new requests and calls again.

        A borrower that wants the device gets a moment to take it, since the time between two steps is too short.
        Serving then waits at most until the end of the grant.
        """
        if self._held:
            return True
        page, self.lent = self._page, False
        free_until = self._clock() + _PICKUP if page.fields.wish and self.can_spare() else 0.0
        while page.lock():
            if not free_until or self._clock() >= free_until:
                self._held = True
                return True
            page.unlock()
            time.sleep(POLL)
        self.lent = self._wants = True
        self._write()
        latest = self._clock() + _LONGEST_WAIT
        while not page.lock():
            now = self._clock()
            if now >= latest or not now < self.expires:  # true also if `expires` is not a number
                if page.lock():
                    break
                self.fenced += 1
                page.fields.epoch += 1
                self._wants = False
                return True
            time.sleep(POLL)
        self._wants = False
        self._held = not self.can_spare()
        if not self._held:
            page.unlock()
        return self._held

    def can_spare(self) -> bool:
        """Whether a borrower wants the device, and serving's last view leaves enough time."""
        view, wish, now = self._said[0], self._page.fields.wish, self._clock()
        return (
            wish > 0
            and self._page.fields.lease > now
            and bool(view.live)
            and not view.waiting
            and view.due - now >= wish
        )

    def note(self, step: ServingStep) -> None:
        """Publish a step, from which borrowers learn bounds on later steps."""
        self._page.add_step(step)

    def release(self) -> None:
        """Release the device, after `publish`."""
        if self._held:
            self._held = False
            self._page.unlock()

    def close(self) -> None:
        self._page.close()

    def _gone(self) -> bool:
        """Whether both borrower and agent have ended. If only the borrower has ended, the agent reports this."""
        if self.leased:
            self._nobody = False
        elif not self._nobody and (self._page.fields.kv_asked or self._page.fields.kv_held):
            # Tested only until the borrower is gone: testing a lock takes the lock for a moment.
            self._nobody = not self._page.has("borrower")
        return self._nobody

    def _write(self) -> None:
        view, kv, pace = self._said
        self._page.say(ServingNotice(view, kv, self._wants, pace, self._clock(), self._pid))
