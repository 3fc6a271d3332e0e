"""The terms of a loan in an engine's order, as plain values."""

from __future__ import annotations

import msgspec

from libra.backends.transport.engine_messages import DeviceLoan
from libra.lend.records.lending import LendingTerms


def device_loan(
    device: str, terms: LendingTerms, record: str | None, share: float = 1.0, kv_beside: int | None = None
) -> DeviceLoan:
    return DeviceLoan(device, msgspec.to_builtins(terms), record, share, kv_beside)


def terms_of(loan: DeviceLoan) -> LendingTerms:
    return msgspec.convert(loan.terms, LendingTerms)
