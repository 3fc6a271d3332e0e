"""Requests of a borrower to its gate, with the answers: the lines of `lending.jsonl`.

Invariant: a file can be replayed: the rule in its first line gives the same answers to the same requests. Times are
seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, TypeAdapter, ValidationError

from libra.config.json_line import line_problem
from libra.config.run import LendingRule
from libra.config.sealed_line import opened
from libra.lend.gate import Gate, Grant, Reason, Refusal, ServingView, SharingRule, Slo
from libra.lend.recall import Recall, RecallPolicy, WatchedRule
from libra.lend.rules import Alternate, NoLending, PositiveSlack, ServeFirst, TimeSlices
from libra.lend.traffic.envelope import Envelope
from libra.records.files import whole_lines
from libra.records.schema import Record, RecordFormatError


@dataclass(frozen=True, slots=True)
class LendingTerms(Record):
    """The first line: lender, borrower, and the rule of the loan."""

    model: str  # that serves
    rollout: str  # model that borrows
    pace: float  # tau
    longest: float  # of a grant (B)
    shortest: float
    envelope: Envelope
    recall: RecallPolicy
    kind: Literal["terms"] = "terms"
    sharing: LendingRule = "gate"  # any other is a baseline
    ttft: float | None = None  # limit of the first token; None: no limit
    slo: Slo | None = None  # of the users; None: in older records

    def rule(self) -> SharingRule:
        match self.sharing:
            case "gate":
                return WatchedRule(Gate(self.longest, self.shortest, self.pace), self.envelope, Recall(self.recall))
            case "serve-first":
                return ServeFirst(self.longest)
            case "naive":
                return Alternate(self.longest)
            case "published":
                return PositiveSlack(self.longest, math.inf if self.ttft is None else self.ttft)
            case "fixed":
                return TimeSlices(self.longest, _SLICES)
            case "off":
                return NoLending()


@dataclass(frozen=True, slots=True)
class LendingAnswer(Record):
    """One question and its answer: `granted` seconds, or the reason why it was `refused`."""

    at: float
    live: int
    waiting: int
    due: float | None  # None: no request has its first token
    oldest: float | None  # None: no request waits
    queued: int
    context: int
    steps: int
    came: int
    longest_step: float | None  # C at that time; None: not known yet
    granted: float | None
    refused: Reason | None
    breach: str | None = None  # the borrower's own reason for a recall, known before the question
    kind: Literal["answer"] = "answer"

    @classmethod
    def of(
        cls, view: ServingView, at: float, longest_step: float, answer: Grant | Refusal, breach: str | None
    ) -> LendingAnswer:
        return cls(
            at=at,
            live=view.live,
            waiting=view.waiting,
            due=None if view.due == math.inf else view.due,
            oldest=None if view.oldest == math.inf else view.oldest,
            queued=view.queued,
            context=view.context,
            steps=view.steps,
            came=view.came,
            longest_step=None if longest_step == math.inf else longest_step,
            granted=answer.length if isinstance(answer, Grant) else None,
            refused=answer.reason if isinstance(answer, Refusal) else None,
            breach=breach,
        )

    @property
    def view(self) -> ServingView:
        due, oldest = (math.inf if it is None else it for it in (self.due, self.oldest))
        return ServingView(self.live, self.waiting, due, oldest, self.queued, self.context, self.steps, self.came)

    @property
    def answer(self) -> Grant | Refusal:
        """The answer of the gate. Raises ValueError for a line without an answer."""
        if self.granted is not None:
            return Grant(self.at + self.granted, self.granted)
        if self.refused is None:
            raise ValueError("neither granted nor refused")
        return Refusal(self.refused)


@dataclass(frozen=True, slots=True)
class LentStep(Record):
    """One step of the borrower."""

    at: float  # its beginning
    seconds: float
    bound: float  # assumed upper bound on its seconds
    tokens: int  # computed in the step
    overstayed: bool  # serving did not wait for the step's end
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class ServedStep(Record):
    """One step of serving. Steps are recorded only while the borrower watches, not while it has nothing to compute."""

    at: float  # its beginning
    seconds: float
    sequences: int
    margin: float | None  # seconds from the earliest due token to its due time; None: no token was due
    kind: Literal["served"] = "served"


@dataclass(frozen=True, slots=True)
class QuotaChange(Record):
    """A change of the borrower's KV memory."""

    at: float
    held: int  # bytes from now on
    put_out: int  # turns evicted for it
    kind: Literal["quota"] = "quota"


_SLICES = 1.0  # seconds: the period in which a fixed split gives each side its share


class _Recorded:
    """The `ServingCost` that the file recorded."""

    def __init__(self, longest_step: float | None) -> None:
        self._longest = math.inf if longest_step is None else longest_step

    def longest_step(self, view: ServingView) -> float:
        return self._longest

    def catch_up(self, view: ServingView) -> float:
        raise ValueError("the record has no catch-up times of serving; replay the record of a gate")


@dataclass(frozen=True, slots=True)
class RecordReplay:
    """Comparison of a file's answers with those of a replay."""

    answers: int
    different: tuple[int, ...]  # numbers of lines with another answer


LendingLine = LendingTerms | LendingAnswer | LentStep | ServedStep | QuotaChange
_LINES: TypeAdapter[LendingLine] = TypeAdapter(Annotated[LendingLine, Discriminator("kind")])


def are_terms(line: bytes) -> bool:
    """Whether `line` is the first line of a lending record."""
    try:
        return isinstance(_LINES.validate_json(opened(line), strict=True), LendingTerms)
    except ValueError:
        return False


def read_lending(path: Path) -> Iterator[LendingLine]:
    """Yield the lines of a file; a last line that was cut off is left out. Raises `RecordFormatError`."""
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            said = _LINES.validate_json(opened(line), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            wrong = "" if first["type"].startswith("union_tag") else f" ({line_problem(first)})"
            raise RecordFormatError(
                f"{path}:{number}: this line does not belong in a lending record{wrong}; give the file as `libra lend"
                " serve` or `libra run` wrote it"
            ) from None
        except ValueError as error:
            raise RecordFormatError(f"{path}:{number}: {error}") from None
        if number == 1 and not isinstance(said, LendingTerms):
            raise RecordFormatError(
                f"{path}:1: a lending record begins with the terms of the loan; give the file as `libra lend serve` or"
                " `libra run` wrote it"
            )
        yield said


def replay(path: Path) -> RecordReplay:
    """Repeat the recorded requests to the recorded rule, and compare the answers. A restarted borrower writes its terms
    again, which starts a new rule. Raises `RecordFormatError`.
    """
    rule: SharingRule | None = None
    different, answers = [], 0
    for number, said in enumerate(read_lending(path), start=1):
        if isinstance(said, LendingTerms):
            rule = said.rule()
        if not isinstance(said, LendingAnswer):
            continue
        assert rule is not None
        if said.breach is not None and isinstance(rule, WatchedRule):
            rule.recall.observe(said.breach, said.at)
        answers += 1
        if rule.decide(said.view, said.at, _Recorded(said.longest_step)) != said.answer:
            different.append(number)
    return RecordReplay(answers, tuple(different))
