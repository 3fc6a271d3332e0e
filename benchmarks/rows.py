"""Results of a benchmark, as rows to print and to keep.

Invariant: the printed rows and the written rows are the same, in the same order. A goal that a row names is either
met or not; a row without a goal promises nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_NAMED = 5  # of what may not be
_WIDTH = 160  # of a table that goes to a file


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number. `goal` is in words, with its unit; it and `met` are None where nothing is promised. `note`
    says what was counted, what contradicts the goal, or why nothing was measured."""

    case: str
    metric: str
    value: float
    unit: str
    goal: str | None = None
    met: bool | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if (self.goal is None) != (self.met is None):
            raise ValueError(f"{self.case}, {self.metric}: goal and met must both be set, or both be None")


def at_most(case: str, metric: str, value: float, unit: str, limit: float | None) -> Row:
    """A row whose value must not exceed the limit; without one it promises nothing."""
    return _judged(case, metric, value, unit, limit, "at most", limit is not None and value <= limit)


def at_least(case: str, metric: str, value: float, unit: str, limit: float | None) -> Row:
    return _judged(case, metric, value, unit, limit, "at least", limit is not None and value >= limit)


def below(case: str, metric: str, value: float, unit: str, limit: float | None) -> Row:
    return _judged(case, metric, value, unit, limit, "below", limit is not None and value < limit)


def spread(
    case: str,
    metric: str,
    values: Iterable[float],
    unit: str,
    shares: Sequence[float] = (0.5, 0.99),
    *,
    median: float | None = None,
    p99: float | None = None,
) -> Iterator[Row]:
    """Rows of quantiles of the values, with the most that the median and the 99th percentile may be."""
    found = list(values)
    for share in shares if found else ():
        name, most = {0.5: ("median", median), 0.99: ("P99", p99), 1.0: ("largest", None)}[share]
        yield at_most(case, f"{metric}, {name}", float(np.quantile(found, share)), unit, most)


def none(case: str, metric: str, value: float, unit: str = "") -> Row:
    """A row whose value must be 0."""
    return Row(case, metric, value, unit, "none", value == 0)


def never(case: str, metric: str, wrong: Iterable[str], counted: str) -> Row:
    """A row of what may not be: each of `wrong` was, of which the first are named; `counted` is what was looked at."""
    found = list(wrong)
    named = "; ".join([*found[:_NAMED], *([f"and {len(found) - _NAMED:,} more"] if len(found) > _NAMED else ())])
    return Row(case, metric, len(found), "", "none", not found, f"{counted}: {named}" if found else counted)


def _judged(case: str, metric: str, value: float, unit: str, limit: float | None, words: str, met: bool) -> Row:
    if limit is None:
        return Row(case, metric, value, unit)
    return Row(case, metric, value, unit, f"{words} {limit:g} {unit}".rstrip(), met)


def report(rows: Sequence[Row], json_path: Path | None) -> None:
    """Print the rows as a table; also write them to `json_path`, if there is one."""
    console = Console()
    (console if console.is_terminal else Console(width=_WIDTH)).print(make_table(rows))
    if json_path is not None:
        write_rows(rows, json_path)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """A JSON line a row."""
    lines = ({key: value for key, value in asdict(row).items() if key != "note" or value} for row in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_table(rows: Sequence[Row]) -> Table:
    """One line a row; a case is named once. Columns of goals and notes are left out where no row has one."""
    with_goals, with_notes = any(row.goal is not None for row in rows), any(row.note for row in rows)
    table = Table()
    names = ("case", "metric", "value", "unit", *(("goal", "met") if with_goals else ()), *(("note",) * with_notes))
    for name in names:
        table.add_column(name, justify="right" if name == "value" else "left")
    previous = None
    for row in rows:
        cells = [escape(row.case) if row.case != previous else "", escape(row.metric), f"{row.value:,.4g}", row.unit]
        if with_goals:
            cells += [escape(row.goal or ""), "" if row.met is None else "yes" if row.met else "[red]no[/]"]
        table.add_row(*cells, *([escape(row.note)] * with_notes))
        previous = row.case
    return table
