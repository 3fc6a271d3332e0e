"""The side of the agent beside the server, whose word a loan hangs on.

Invariant: a loan ends with the lender's word: a time, which the agent puts off for as long as all is well. One process
lends.
"""

from __future__ import annotations

import os
from pathlib import Path

from libra.backends.lend.device_page import BorrowerTally, DevicePage, EngineFacts, LendingError, ServingNotice


class LenderToken:
    """Raises LendingError where there is no page, or another agent lends."""

    def __init__(self, path: Path) -> None:
        self._page = DevicePage(path, create=False)
        try:
            self._only = self._page.only("lender", "another agent lends this device; one at a time can")
        except LendingError:
            self._page.close()
            raise
        self.extend(0.0)

    @property
    def replaced(self) -> bool:
        """The file of that name is another one by now."""
        return self._page.replaced

    @property
    def borrowed(self) -> bool:
        """Whether a process borrows: one at a time can."""
        return self._page.has("borrower")

    def extend(self, until: float) -> None:
        """The device may be borrowed until then; 0: not any more."""
        self._page.fields.lease = until

    def borrower_gone(self) -> None:
        """Its process has ended, so it has no memory and asks for none: nobody else would say so for one that was
        killed."""
        self._page.fields.kv_asked = self._page.fields.kv_held = 0

    def about(self) -> EngineFacts:
        """The engine that serves. Raises LendingError where it did not say."""
        return self._page.facts

    def look(self) -> ServingNotice:
        """What serving said last. Raises LendingError where its writer ended in the middle of it."""
        return self._page.notice

    @property
    def tally(self) -> BorrowerTally:
        """What came of the loan so far."""
        return self._page.tally

    def close(self) -> None:
        self.extend(0.0)
        os.close(self._only)
        self._page.close()
