"""A table of what was found: written in Markdown for the page, and as rows to print and to keep.

Invariant: the page and the rows have the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.evaluation.estimates import Estimate
from benchmarks.page import markdown
from benchmarks.rows import Row

Value = float | str | Estimate | None  # None: nothing is known


@dataclass(frozen=True, slots=True)
class Column:
    """Numbers of one kind. The unit is part of the name, where the name needs one; `%` is written after each number."""

    name: str
    form: str = ",.0f"  # format of its numbers
    unit: str = ""

    def written(self, value: Value) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        estimate = value if isinstance(value, Estimate) else Estimate(value)
        said = estimate.written(self.form)
        return f"{said} %" if self.unit == "%" else said


@dataclass(frozen=True, slots=True)
class Table:
    """`head` is the heading of the labels; `case` says what all rows are of, beside their labels."""

    head: str
    columns: tuple[Column, ...]
    body: Mapping[str, Sequence[Value]]  # by label
    case: str = ""

    def rows(self) -> Iterator[Row]:
        """A row for each number; text, such as what others published, is on the page alone."""
        for label, values in self.body.items():
            for column, value in zip(self.columns, values, strict=True):
                number = value.value if isinstance(value, Estimate) else value
                if number is not None and not isinstance(number, str):
                    yield Row(", ".join(filter(None, (self.case, label))), column.name, number, column.unit)

    def markdown(self) -> str:
        """Raises ValueError for a label that has not a value for each column."""
        body = [
            [label, *(column.written(value) for column, value in zip(self.columns, values, strict=True))]
            for label, values in self.body.items()
        ]
        return markdown([self.head, *(it.name for it in self.columns)], body)
