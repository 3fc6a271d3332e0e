"""A clock that jumps, set by a user or by the network, is none that loans and weights go by."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import libra

SOURCES = Path(libra.__file__).parent
PARTS = ("lend", "backends/weights")
FILES = [
    path
    for part in PARTS
    for path in ([SOURCES / part] if part.endswith(".py") else sorted((SOURCES / part).rglob("*.py")))
]
STEADY = {"monotonic", "process_time", "sleep", "perf_counter"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_nobody_asks_what_time_of_day_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module not in ("time", "datetime"), f"{path}:{node.lineno}"
        elif isinstance(node, ast.Import):
            assert "datetime" not in {name.name for name in node.names}, f"{path}:{node.lineno}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            assert node.attr in STEADY, f"{path}:{node.lineno}: time.{node.attr}"
