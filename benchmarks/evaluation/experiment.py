"""An experiment: a question, the cells that answer it, and what is found in their results, as rows to print and to
keep, figures, and tables of a page in Markdown.

Invariant: what is found is a function of the results alone, and the page and the rows have the same numbers. A name
stands for one experiment, and is its module's. Whatever stands outside of a page's places stays as it is, to the byte;
a table without a place, and a place without a table, are errors.

A place is `<!-- table: EXPERIMENT/TABLE -->` on a line, what was there before, and `<!-- end -->` on a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.estimates import Estimate
from benchmarks.evaluation.figures import BarChart
from benchmarks.rows import Row
from libra.config.yaml_file import unknown

PLACE = re.compile(r"^(<!-- table: ([a-z0-9-]+/[a-z0-9-]+) -->\r?\n)(.*?)^(<!-- end -->)$", re.DOTALL | re.MULTILINE)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with these tables, by BENCHMARK/TABLE, in their places. What is in the places of benchmarks that have no
    table here stays. Raises ValueError where a benchmark's tables and its places differ."""
    made = {name.partition("/")[0] for name in tables}
    places = sorted(place[2] for place in PLACE.finditer(page) if place[2].partition("/")[0] in made)
    if places != sorted(tables):
        raise ValueError(
            f"the page has places for {', '.join(places) or 'nothing'}, and the tables are {', '.join(sorted(tables))};"
            " give each a line <!-- table: NAME --> and a line <!-- end -->, once"
        )
    return PLACE.sub(lambda it: f"{it[1]}\n{tables[it[2]].strip()}\n\n{it[4]}" if it[2] in tables else it[0], page)


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
        """Text in the first column, then numbers. Raises ValueError for a label without a value for each column."""
        lines = [[self.head, *(it.name for it in self.columns)], ["---", *["---:"] * len(self.columns)]]
        for label, values in self.body.items():
            lines.append([label, *(column.written(it) for column, it in zip(self.columns, values, strict=True))])
        return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in lines)


def _escaped(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")


MODULES = (  # of this package, in the order of the page; each has an `EXPERIMENT`
    "step_price",
    "throughput",
    "ablation",
)


@dataclass(frozen=True, slots=True)
class Found:
    """Tables and figures, by their names on the page, and rows that no table has, goals among them.

    The table `sums` of experiment `work` stands between `<!-- table: work/sums -->` and `<!-- end -->`; the figure
    `sums` is written to `work-sums.svg`.
    """

    tables: Mapping[str, Table]
    figures: Mapping[str, BarChart]
    more: Sequence[Row] = ()

    @property
    def rows(self) -> list[Row]:
        return [*(row for table in self.tables.values() for row in table.rows()), *self.more]


@dataclass(frozen=True, slots=True)
class Experiment:
    """`name` is its module's, with `-` for `_`. `cells` takes whether a quick look will do: fewer seeds, smaller sizes.
    `found` gets the results in the order of the cells."""

    name: str
    title: str
    question: str
    cells: Callable[[bool], Sequence[Cell]]
    found: Callable[[Sequence[Result]], Found]


def experiments(names: Sequence[str] = ()) -> tuple[Experiment, ...]:
    """The named experiments, or all, in the order of the page. Raises ValueError for an unknown name."""
    known: dict[str, Experiment] = {}
    for module in MODULES:
        experiment: Experiment = import_module(f"benchmarks.evaluation.{module}").EXPERIMENT
        known[experiment.name] = experiment
    for name in names:
        if name not in known:
            raise ValueError(unknown("experiment", name, known))
    return tuple(it for name, it in known.items() if not names or name in names)
