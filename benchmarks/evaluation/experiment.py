"""An experiment: a question, the cells that answer it, and what they say as rows, tables and figures.

Invariant: rows, tables and figures are functions of the results alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.rows import Row

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Experiment:
    """`name` is its module's, with `-` for `_`. `cells` is told whether a quick look will do: fewer seeds, smaller
    sizes. Results come in the order of the cells.

    A table is Markdown; the one called `sums` of experiment `work` stands between `<!-- table: work/sums -->` and
    `<!-- end -->`. A figure is SVG; the one called `sums` is written to `work-sums.svg`.
    """

    name: str
    title: str
    question: str
    cells: Callable[[bool], Sequence[Cell]]
    rows: Callable[[Sequence[Result]], Sequence[Row]]
    tables: Callable[[Sequence[Result]], Mapping[str, str]]
    figures: Callable[[Sequence[Result]], Mapping[str, str]]
    lacks: Callable[[], str | None] = lambda: None  # why it cannot be run here, and the remedy; None: it can

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name is {self.name!r}; give small letters, digits and single hyphens")
        for field, value in (("title", self.title), ("question", self.question)):
            if not value.strip():
                raise ValueError(f"experiment {self.name}: {field} is empty; say in words what is found out")
