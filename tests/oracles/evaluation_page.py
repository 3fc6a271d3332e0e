"""What the page of the evaluation has a place for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from benchmarks.evaluation.page import with_tables
from benchmarks.evaluation.registry import experiments

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def require_places(experiment: str, tables: Mapping[str, str], figures: Collection[str]) -> None:
    """The page has one place for each of the experiment's tables, shows each of its figures once, and has no others."""
    page = PAGE.read_text(encoding="utf-8")
    known = [it.name for it in experiments()]
    with_tables(page, {f"{experiment}/{name}": text for name, text in tables.items()}, known)  # raises
    shown = re.findall(rf"\(figures/{experiment}-([a-z0-9-]+)\.svg\)", page)
    assert sorted(shown) == sorted(figures)
