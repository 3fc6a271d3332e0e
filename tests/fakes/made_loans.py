"""The records of two made-up lent devices, small enough to be reckoned with by hand."""

from __future__ import annotations

from pathlib import Path

from fakes.made_run import write_lines

from libra.lend.gate import Slo
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingAnswer, LendingTerms, LentStep, QuotaChange, ServedStep
from libra.lend.records.served import ServedRequest
from libra.lend.traffic.envelope import Envelope
from libra.records.schema import EventRecord, StepLoan

BEGAN = 5000.0  # on the machine's clock
SLO = Slo(0.5, 0.1)
TERMS = LendingTerms(
    "chat", "policy", 0.08, 0.04, 0.004, Envelope(2.0, 900, 8, 4000, 5.0), RecallPolicy(1.0, 8.0), slo=SLO
)
EVENTS = (
    EventRecord(0.0, "began", None, "reinforcement learning begins", clock=BEGAN),
    EventRecord(6.0, "recalled", "lent-1", "4 requests/s, lent up to 2"),
    EventRecord(8.5, "lent_again", "lent-1", "its device is lent again"),
)
LOANS = {"lent-0": StepLoan(1.0, 0.5, 3, ""), "lent-1": StepLoan(0.5, 0.25, 4, "4 requests/s, lent up to 2")}


def answer(at: float, granted: float | None, live: int = 0, came: int = 0) -> LendingAnswer:
    refused = None if granted is not None else "due" if live else "load"
    return LendingAnswer(BEGAN + at, live, 0, None, None, 0, 100 * live, 1, came, 0.02, granted, refused)


def request(number: int, came: float, ttft: float, tpot: float = 0.01, tokens: int = 11) -> ServedRequest:
    return ServedRequest(number, came, 20, tokens, ttft, tpot, BEGAN + came)


def write_loans(directory: Path) -> None:
    """Device 0 is lent for 40 ms at 1 and at 2 s, half of it used, the second grant overstayed; steps of serving at 3
    and 4 s end 50 ms before the due and 10 ms after it; of four requests two miss, the second while nothing was lent.
    Device 1 is lent for half a second, and recalled later."""
    write_lines(
        directory / "lending-0.jsonl",
        [
            TERMS,
            answer(1.0, 0.04),
            LentStep(BEGAN + 1.0, 0.02, 0.03, 7, False),
            answer(2.0, 0.04, live=4, came=1),
            LentStep(BEGAN + 2.0, 0.02, 0.03, 5, True),
            QuotaChange(BEGAN + 2.5, 3 << 20, 1),
            ServedStep(BEGAN + 3.0, 0.01, 2, 0.05),
            ServedStep(BEGAN + 4.0, 0.01, 3, -0.01),
            answer(4.5, None, live=8, came=1),
            answer(9.0, None),
        ],
    )
    write_lines(
        directory / "served-0.jsonl",
        [request(0, 0.5, 0.1), request(1, 1.9, 0.6), request(2, 5.0, 0.7), request(3, 9.0, 0.2)],
    )
    write_lines(directory / "lending-1.jsonl", [TERMS, answer(1.0, 0.5), LentStep(BEGAN + 1.0, 0.5, 0.5, 90, False)])
    write_lines(directory / "served-1.jsonl", [request(0, 2.0, 0.1)])
