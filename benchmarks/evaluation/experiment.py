"""An experiment: a question, the cells that answer it, and what is found in their results.

Invariant: what is found is a function of the results alone. A name stands for one experiment, and is its module's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.figures import BarChart
from benchmarks.evaluation.table import Table
from benchmarks.rows import Row
from libra.config.yaml_file import unknown

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
