"""A rollout engine whose device is lent, as its worker drives it.

Invariant: what it computes on the device it computes within a grant. Nobody else borrows the device from before the
engine is made until its process ends.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from libra.backends.lend.borrower import GatedBorrower
from libra.backends.lend.device import device_here
from libra.backends.lend.device_token import BorrowerToken
from libra.backends.lend.record import LendingRecord
from libra.backends.transport.engine_messages import DeviceLoan, Generate

if TYPE_CHECKING:
    from libra.backends.vllm.engine import VllmEngine
    from libra.backends.vllm.report import Sampled


class BorrowingEngine:
    """Make it first, then the engine, then `lend` it."""

    def __init__(self, loan: DeviceLoan) -> None:
        """Raises LendingError where the device cannot be borrowed, DiskError where the record cannot be written."""
        terms = loan.terms
        self._token = BorrowerToken(Path(loan.device), terms.pace)
        self._record = None if loan.record is None else LendingRecord(Path(loan.record), terms, _tell)
        self._loan = loan

    def lend(self, engine: VllmEngine) -> None:
        """From now on. What the engine sets up with its first steps is part of its start."""
        terms, rule = self._loan.terms, self._loan.terms.rule()
        self._engine = engine
        engine.add(Generate("warm-up", [4 + index % 16 for index in range(16)], 4, 1.0, -1, 0, salt="warm-up"))
        while engine.busy:
            engine.step()
        self._borrower = GatedBorrower(
            self._token,
            rule,
            device_here(self._loan.share),
            shortest=terms.shortest,
            most_tokens=engine.most_tokens,
            recall=rule.recall,
            record=self._record,
        )

    def step(self) -> list[Sampled] | None:
        """One step if there is a grant; else None, after a moment."""
        return self._borrower.step(self._engine)

    def rest(self) -> None:
        """There are no turns."""
        self._borrower.rest()


def _tell(line: str) -> None:
    print(f"libra: {line}", file=sys.stderr, flush=True)
