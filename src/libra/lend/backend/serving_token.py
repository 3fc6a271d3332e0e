"""The serving engine's side of a lent device: it takes the device for a step, and releases it.

Invariant: serving never waits for a borrower longer than the current grant. The lock alone cannot guarantee this, since
the kernel frees it only after it has removed a killed process. So a grant has an end, which is written before the grant
begins. After this end, serving continues without the lock, and reports this by a new epoch.
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

_PICKUP = 0.001  # seconds that a borrower has to take what serving can spare
_LONGEST_WAIT = 5.0  # seconds for a grant at most, whatever the page says: grants are tenths of a second


class ServingToken:
    """Serving's view of the page. Makes the file if there is none; the page of an earlier server is taken over, and its
    borrower continues."""

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
        """Seconds per token to which the borrower may slow serving down; 0: there was no borrower yet."""
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
        """Take the device. False: the device was lent meanwhile, and serving again has time to spare; publish the new
        requests, and call again.

        A borrower that wants the spare time gets a moment to take the device, since the time between two steps is too
        short. Serving then waits at most until the end of the grant.
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
            if now >= latest or not now < self.expires:  # also where it is not a number
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
        """Publish a step, from which a borrower bounds the next ones."""
        self._page.add_step(step)

    def release(self) -> None:
        """Release the device, after `publish`."""
        if self._held:
            self._held = False
            self._page.unlock()

    def close(self) -> None:
        self._page.close()

    def _gone(self) -> bool:
        """Whether borrower and agent are both gone; if only the borrower is gone, the agent reports it."""
        if self.leased:
            self._nobody = False
        elif not self._nobody and (self._page.fields.kv_asked or self._page.fields.kv_held):
            # Tested until it is so, and not again: testing a lock takes it for a moment.
            self._nobody = not self._page.has("borrower")
        return self._nobody

    def _write(self) -> None:
        view, kv, pace = self._said
        self._page.say(ServingNotice(view, kv, self._wants, pace, self._clock(), self._pid))
