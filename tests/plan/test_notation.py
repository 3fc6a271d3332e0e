"""One name for each family of constraints, wherever it is said or solved for."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from libra.plan import problem
from libra.plan.explain import conflict
from libra.plan.model.cpsat import StepModel
from libra.plan.model.ilp import StepProgram
from libra.plan.problem import Family

FAMILIES = get_args(Family)
DOCS = Path(__file__).parents[2] / "docs" / "planning.md"


@pytest.mark.parametrize("text", [problem.__doc__, DOCS.read_text()], ids=["problem", "docs"])
def test_every_family_stands_on_the_page_of_notation(text: str) -> None:
    assert [family for family in FAMILIES if not re.search(rf"^(\s+|\| `){family}\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize("model", [StepModel, StepProgram])
def test_constraints_of_a_model_are_families(model: type) -> None:
    source = inspect.getsource(model)
    named = set(re.findall(r'(?:with_name\(f?|_add\(f?|name = f?)"([a-z_]+?)(?:_?[\[{].*?)?"', source))
    assert named - {"different", "fewest", "starts"} <= set(FAMILIES)
    assert {"one_training", "every_class_once", "most_buckets", "one_bucket_per_shape", "devices"} <= named


def test_conflicts_are_of_families() -> None:
    assert set(re.findall(r'Constraint\(\s*"(\w+)"', inspect.getsource(conflict))) <= set(FAMILIES)
