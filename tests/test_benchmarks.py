"""The list of benchmarks: all there are, each with what it shows and how long it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import HERE, TIMES, main, shown


def _has_a_command(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text(encoding="utf-8")


def test_every_command_is_listed_and_no_other() -> None:
    single = {path.stem for path in HERE.glob("*.py") if _has_a_command(path)} - {"__main__"}
    packages = {path.parent.name for path in HERE.glob("*/__main__.py")}
    assert set(TIMES) == single | packages


def test_the_list_says_what_each_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "planning" in listed and "7 minutes" in listed
    assert all(len(shown(name)) > 20 for name in TIMES)
