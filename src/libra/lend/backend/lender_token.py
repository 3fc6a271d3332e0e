"""The agent's side of a lent device.

Invariant: the lender's word is a time, which the agent extends while all checks pass; the loan ends at this time. Only
one process lends.
"""

from __future__ import annotations

import os
from pathlib import Path

from libra.lend.backend.device_page import BorrowerTally, DevicePage, EngineFacts, LendingError, ServingNotice


class LenderToken:
    """The agent's view of the page. Raises LendingError if there is no page, or another agent lends."""

    def __init__(self, path: Path) -> None:
        self._page = DevicePage(path, create=False)
        try:
            self._only = self._page.only("lender", "another agent lends this device; only one can at a time")
        except LendingError:
            self._page.close()
            raise
        self.extend(0.0)

    @property
    def replaced(self) -> bool:
        """Whether the page's path now names another file."""
        return self._page.replaced

    @property
    def borrowed(self) -> bool:
        """Whether a process borrows; at most one can."""
        return self._page.has("borrower")

    def extend(self, until: float) -> None:
        """Permit borrowing until the given time; 0 ends it."""
        self._page.fields.lease = until

    def borrower_gone(self) -> None:
        """Note that the borrower's process has ended, so it has no memory and wants none: a killed process cannot
        report that itself."""
        self._page.fields.kv_asked = self._page.fields.kv_held = 0

    def about(self) -> EngineFacts:
        """Description of the serving engine. Raises LendingError if there is none."""
        return self._page.facts

    def look(self) -> ServingNotice:
        """Serving's last notice. Raises LendingError if its writer ended while writing it."""
        return self._page.notice

    @property
    def tally(self) -> BorrowerTally:
        """Totals of the loan so far."""
        return self._page.tally

    def close(self) -> None:
        self.extend(0.0)
        os.close(self._only)
        self._page.close()
