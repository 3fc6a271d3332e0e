"""One published figure beside its price, and the bars that groups of them have.

Invariant: a case has a price or the reason why it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.rows import Row


@dataclass(frozen=True, slots=True)
class PublicCase:
    """`published` and `priced` have the group's unit. `bar` is the largest error that is accepted, as a share."""

    name: str
    published: float
    priced: float | None
    bar: float
    note: str = ""  # the reason of a refusal, or what differs between the case and what was priced

    @property
    def error(self) -> float | None:
        return None if self.priced is None else self.priced / self.published - 1

    @property
    def met(self) -> bool:
        return self.error is not None and abs(self.error) <= self.bar


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """Cases of one kind. `mean_bar` is the largest mean error that is accepted; None: only each case has a bar."""

    name: str
    unit: str
    cases: Sequence[PublicCase]
    mean_bar: float | None = None

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors of all cases that have a price."""
        return fmean(abs(case.error) for case in self.cases if case.error is not None)

    def show(self, console: Console) -> None:
        table = Table(title=f"{self.name}, {self.unit}", title_justify="left")
        for column in ("case", "published", "priced", "error", "bar", "met", "note"):
            table.add_column(column, justify="left" if column in ("case", "met", "note") else "right")
        for case in self.cases:
            refused = case.error is None
            table.add_row(
                escape(case.name),
                f"{case.published:,.6g}",
                "refused" if case.priced is None else f"{case.priced:,.6g}",
                "" if case.error is None else f"{case.error:+.1%}",
                f"{case.bar:.1%}",
                "yes" if case.met else "no",
                escape(case.note) if refused or len(case.note) < 60 else escape(case.note[:57] + "..."),
            )
        console.print(table)

    def rows(self) -> list[Row]:
        """The errors in percent, then their mean, and how many are within their bars and refused."""
        found = [
            Row(
                f"{self.name}: {case.name}",
                "error",
                100 * case.error,
                "%",
                f"at most {case.bar:.1%} either way",
                case.met,
            )
            for case in self.cases
            if case.error is not None
        ]
        refused = sum(case.error is None for case in self.cases)
        within, number = sum(case.met for case in self.cases), len(self.cases)
        if found:
            mean = self.mean_error
            goal = None if self.mean_bar is None else f"at most {self.mean_bar:.0%}"
            met = None if self.mean_bar is None else mean <= self.mean_bar
            found.append(Row(self.name, "mean absolute error", 100 * mean, "%", goal, met))
        found.append(Row(self.name, "within their bars", within, f"of {number}", "all", within == number))
        return [*found, Row(self.name, "refused", refused, "cases", "none", refused == 0)]
