"""The borrower's side of a device that is lent.

Invariant: the end of a grant is written before the grant begins, so a process that finds the device taken can read the
end. Only one process borrows.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from libra.lend.backend.device_page import (
    BorrowerTally,
    DevicePage,
    EngineFacts,
    LendingError,
    ServingNotice,
    ServingStep,
)


class FencedError(RuntimeError):
    """The borrower held the device beyond its grant, and serving continued, so the borrower must stop."""


class BorrowerToken:
    """The borrower's view of the device page. Raises LendingError if the page does not exist, or another process
    borrows the device."""

    def __init__(self, path: Path, pace: float) -> None:
        """`pace` is tau: seconds per token to which serving may be slowed down."""
        if not 0 < pace < math.inf:
            raise ValueError(f"a pace of {pace:g} s a token; give a positive and finite number")
        self._page = DevicePage(path, create=False)
        try:
            self._only = self._page.only("borrower", "another borrower has this device; end that borrower first")
        except LendingError:
            self._page.close()
            raise
        self._seen, self._epoch = self._page.fields.steps, 0
        self._page.fields.pace = pace
        self.wish(0.0)
        self.say_kv(0, 0)  # the memory of an earlier borrower was freed with its process
        self.tell(BorrowerTally())

    @property
    def lease(self) -> float:
        """Time until which the lender's word is valid."""
        return self._page.fields.lease

    def about(self) -> EngineFacts:
        """Description of the serving engine. Raises LendingError if the page has none."""
        return self._page.facts

    def look(self) -> ServingNotice:
        """Serving's last notice. Raises LendingError if the server ended while it wrote the notice."""
        return self._page.notice

    def tell(self, tally: BorrowerTally) -> None:
        """Publish the totals of the loan so far."""
        self._page.tally = tally

    def wish(self, seconds: float) -> None:
        """Publish the least slack of serving that makes a grant useful: one serving step plus the shortest rollout
        step. 0: the borrower has no work.
        """
        self._page.fields.wish = seconds

    def say_kv(self, asked: int, held: int) -> None:
        """Publish the bytes of KV that serving should cede, and the bytes of ceded KV in use."""
        self._page.fields.kv_asked = asked
        self._page.fields.kv_held = held

    def try_take(self, expires: float) -> bool:
        """Take the device if it is free; serving then waits at most until `expires`. The caller must read serving's
        notice again before it uses the device: the notice may have changed before this call, and later only new
        requests change it.
        """
        # Written before the lock is taken: a process that finds the device taken reads the end of the grant.
        self._page.fields.expires = expires
        if not self._page.lock():
            return False
        self._epoch = self._page.fields.epoch
        return True

    def shorten(self, expires: float) -> None:
        """Move the end of the grant, until which serving waits, to an earlier time."""
        self._page.fields.expires = expires

    def release(self) -> None:
        """Release the device. Raises FencedError if serving did not wait for the release."""
        self._page.unlock()
        if self._page.fields.epoch != self._epoch:
            raise FencedError(f"{self._page.path}: the grant was over, and serving did not wait for the release")

    def steps(self) -> list[ServingStep]:
        """Serving's steps since the last call; at most the last 63, since older ones are overwritten."""
        seen, self._seen = self._seen, self._page.fields.steps
        return self._page.steps_between(seen, self._seen)

    def close(self) -> None:
        self.wish(0.0)
        self.say_kv(0, 0)
        os.close(self._only)
        self._page.close()
