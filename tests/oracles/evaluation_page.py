"""Checks that the findings of an experiment fit their places in the page of the evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.evaluation.cells import Result
from benchmarks.evaluation.experiment import Experiment, Found, with_tables

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def require_found(experiment: Experiment, results: Sequence[Result]) -> Found:
    """Require that findings have distinct rows, tables that fit into a page, and figures that can be drawn."""
    found = experiment.found(results)
    assert found.tables
    assert len({(row.case, row.metric) for row in found.rows}) == len(found.rows) > 0
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in (*found.tables, *found.figures))
    tables = {f"{experiment.name}/{name}": table.markdown() for name, table in found.tables.items()}
    page = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in tables)
    assert with_tables(page, tables)
    assert all("<svg" in figure.svg() for figure in found.figures.values())
    return found


def require_places(experiment: Experiment, found: Found) -> None:
    """Require that the page has exactly one place for each table and each figure of the experiment."""
    page = PAGE.read_text(encoding="utf-8")
    tables = {f"{experiment.name}/{name}": table.markdown() for name, table in found.tables.items()}
    with_tables(page, tables)  # raises
    shown = re.findall(rf"\(figures/{experiment.name}-([a-z0-9-]+)\.svg\)", page)
    assert sorted(shown) == sorted(found.figures)
