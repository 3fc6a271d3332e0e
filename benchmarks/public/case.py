"""One published figure beside its price, and the bars that groups of them have.

Invariant: a case has a price or the reason why it has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.rows import Row, at_most, never


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

    def rows(self) -> Iterator[Row]:
        """The errors in percent, then the mean of their sizes, and how many are within their bars and refused."""
        errors = []
        for it in self.cases:
            if it.error is None:
                continue
            errors.append(100 * abs(it.error))
            both = f"{it.priced:,.6g} for {it.published:,.6g} {self.unit}"
            note = f"{both}: {it.note}" if it.note else both
            goal = f"at most {100 * it.bar:.1f} % either way"
            yield Row(f"{self.name}: {it.name}", "error", 100 * it.error, "%", goal, it.met, note)
        limit = None if self.mean_bar is None else 100 * self.mean_bar
        yield at_most(self.name, "mean absolute error", fmean(errors), "%", limit)
        within, number = sum(it.met for it in self.cases), len(self.cases)
        yield Row(self.name, "within their bars", within, f"of {number}", "all", within == number)
        refused = [f"{it.name}: {it.note}" for it in self.cases if it.error is None]
        yield never(self.name, "refused", refused, f"{number} cases")
