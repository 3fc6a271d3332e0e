"""Checks that an agent's server is alive, and is the certified one.

Invariant: a check notices that the server has ended or was replaced. The check relies on the server's process, not on
the contents of the device's page.
"""

from __future__ import annotations

import contextlib
import os
import select

from libra.lend.backend.device_page import EngineFacts, LendingError
from libra.lend.backend.lender_file import LoanOrder
from libra.lend.backend.lender_token import LenderToken


class ServerWatch:
    """Checks the server of a loan, which its owner may end and start at any time."""

    def __init__(self, lender: LoanOrder, token: LenderToken) -> None:
        """Raises LendingError if the loan cannot begin: another model, too little memory, or no server."""
        self._lender, self._token = lender, token
        self._pid, self._process = 0, -1
        self._facts = token.about()
        lender.refuse_other(self._facts)
        try:
            if (objection := self._seen()) is not None:
                raise LendingError(f"{lender.device}: {objection}; start the server first")
            lender.refuse_memory(token.look().kv)
        except LendingError:
            self.close()
            raise

    def objection(self) -> str | None:
        """Reason why the server's device must not be lent now; None if it may be lent."""
        try:
            return self._seen()
        except LendingError as error:
            return str(error)

    def _seen(self) -> str | None:
        """As `objection`, but raises LendingError for reasons that come with a remedy."""
        pid = self._token.look().pid
        if pid != self._pid:
            self.close()
            facts = self._token.about()
            self._lender.refuse_other(facts)
            if facts != self._facts:
                return _other_limits(facts, self._facts)
            with contextlib.suppress(ProcessLookupError):
                self._process = os.pidfd_open(pid)
            self._pid = pid
        alive = self._process >= 0 and not select.select([self._process], [], [], 0)[0]
        return None if alive else "the serving engine has ended"

    def close(self) -> None:
        if self._process >= 0:
            os.close(self._process)
        self._pid, self._process = 0, -1


def _other_limits(now: EngineFacts, before: EngineFacts) -> str:
    """The objection to changed limits: the borrower has learnt from steps under the old limits."""
    other = next(name for name, value in now._asdict().items() if value != getattr(before, name))
    return (
        f"the serving engine was restarted with {other} {getattr(now, other)} instead of {getattr(before, other)};"
        " start `libra lend serve` again"
    )
