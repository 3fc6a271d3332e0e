"""The agent's side of a lent device.

Invariant: the lender's word is a time at which the loan ends. The agent extends this time while all checks pass. Only
one process lends.
"""

from __future__ import annotations

import os
from pathlib import Path

from libra.lend.backend.device_page import BorrowerTally, DevicePage, EngineFacts, LendingError, ServingNotice


class LenderToken:
    """The agent's view of the device page. Raises LendingError if the page does not exist, or another agent lends the
    device."""

    def __init__(self, path: Path) -> None:
        self._page = DevicePage(path, create=False)
        try:
            self._only = self._page.only("lender", "another agent lends this device; end that agent first")
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
        """Whether a process borrows the device."""
        return self._page.has("borrower")

    def extend(self, until: float) -> None:
        """Permit borrowing until the time `until`; 0 ends the permission."""
        self._page.fields.lease = until

    def borrower_gone(self) -> None:
        """Record that the borrower has ended and neither has nor requests KV memory. A killed borrower cannot report
        this itself."""
        self._page.fields.kv_asked = self._page.fields.kv_held = 0

    def about(self) -> EngineFacts:
        """Description of the serving engine. Raises LendingError if the page has none."""
        return self._page.facts

    def look(self) -> ServingNotice:
        """Serving's last notice. Raises LendingError if the server ended while it wrote the notice."""
        return self._page.notice

    @property
    def tally(self) -> BorrowerTally:
        """Totals of the loan so far."""
        return self._page.tally

    def close(self) -> None:
        self.extend(0.0)
        os.close(self._only)
        self._page.close()
