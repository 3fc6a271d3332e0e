"""The page, the registry and the command: tables reach their places, and nothing else moves."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.evaluation_page import PAGE as EVALUATION

from benchmarks.evaluation import __main__ as command
from benchmarks.evaluation.cells import Cell
from benchmarks.evaluation.estimates import Estimate
from benchmarks.evaluation.experiment import MODULES, PLACE, Column, Experiment, Found, Table, experiments, with_tables

PAGE = """# Page
before
<!-- table: one/a -->
old
<!-- end -->
between
<!-- table: two/a -->

| kept |

<!-- end -->
<!-- a comment -->
<!-- table: one/b -->
<!-- end -->
after"""


def test_tables_reach_their_places_and_the_rest_stays() -> None:
    written = with_tables(PAGE, {"one/a": "| A |\n", "one/b": "| B |"})
    assert written == PAGE.replace("old\n", "\n| A |\n\n").replace(
        "<!-- table: one/b -->\n", "<!-- table: one/b -->\n\n| B |\n\n"
    )
    assert with_tables(written, {"one/a": "| A |", "one/b": "| B |"}) == written
    assert with_tables(PAGE, {}) == PAGE


_TEXT = st.text(st.sampled_from("ab <>|-!\r\n"), max_size=30).filter(lambda it: "<!--" not in it)


@given(st.lists(_TEXT, min_size=2, max_size=5), st.lists(_TEXT, min_size=4, max_size=4))
@settings(max_examples=50)
def test_what_is_outside_of_the_markers_stays(outside: list[str], inside: list[str]) -> None:
    def page(contents: list[str]) -> str:
        places = [f"\n<!-- table: x/t{number} -->\n{text}<!-- end -->\n" for number, text in enumerate(contents)]
        return "".join(part for pair in zip(outside, [*places, ""], strict=True) for part in pair)

    count = len(outside) - 1
    tables = {f"x/t{number}": f"| {number} |" for number in range(count)}
    before = page([f"{text}\n" for text in inside[:count]])
    assert with_tables(before, tables) == page([f"\n{text}\n\n" for text in tables.values()])


@pytest.mark.parametrize(
    ("page", "tables"),
    [
        ("", {"one/a": ""}),
        (PAGE, {"one/a": ""}),
        (PAGE, {"one/a": "", "one/b": "", "one/c": ""}),
        ("<!-- table: one/a -->\n", {"one/a": ""}),
        ("<!-- table: one/a -->\n<!-- end -->\n" * 2, {"one/a": ""}),
        ("text <!-- table: one/a -->\n<!-- end -->\n", {"one/a": ""}),
    ],
)
def test_a_page_that_does_not_fit_is_refused(page: str, tables: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"the page has places for .*, and the tables are one/a"):
        with_tables(page, tables)


def test_a_table_is_one_line_a_row() -> None:
    columns = (Column("b"), Column("share", ".1f", "%"), Column("speed", ",.0f", "tokens/s"))
    body = {"x|y": ("1\n2", 0.25, Estimate(1000.0, (900.0, 1100.0))), "z": (None, Estimate(2.0, (1.0, 3.0)), 7)}
    table = Table("a", columns, body, "case")
    assert table.markdown().splitlines() == [
        "| a | b | share | speed |",
        "| --- | ---: | ---: | ---: |",
        "| x\\|y | 1 2 | 0.2 % | 1,000 (900 to 1,100) |",
        "| z |  | 2.0 (1.0 to 3.0) % | 7 |",
    ]
    rows = [(row.case, row.metric, row.value, row.unit) for row in table.rows()]
    assert rows == [
        ("case, x|y", "share", 0.25, "%"),
        ("case, x|y", "speed", 1000.0, "tokens/s"),
        ("case, z", "share", 2.0, "%"),
        ("case, z", "speed", 7, "tokens/s"),
    ]
    with pytest.raises(ValueError, match="shorter"):
        Table("a", columns, {"z": (1.0,)}).markdown()


def test_every_experiment_is_registered_under_its_own_name() -> None:
    known = experiments()
    assert [one.name.replace("-", "_") for one in known] == list(MODULES)
    assert experiments([known[1].name]) == (known[1],)
    assert experiments([one.name for one in reversed(known)]) == known
    with pytest.raises(ValueError, match="did you mean step-price"):
        experiments(["step-prize"])


@pytest.mark.parametrize("experiment", experiments(), ids=lambda one: one.name)
def test_the_cells_of_every_experiment_can_be_told_apart(experiment: Experiment) -> None:
    quick, full = experiment.cells(True), experiment.cells(False)
    for cells in (quick, full):
        assert cells
        assert len({cell.name for cell in cells}) == len(cells)
        calls = {(cell.function_name, json.dumps(cell.arguments, sort_keys=True)) for cell in cells}
        assert len(calls) == len(cells)
        assert all(path.is_file() for cell in cells for path in cell.inputs)
    # A first look may take fewer steps, which names say; it asks about nothing else.
    assert _but_for_steps(quick) <= _but_for_steps(full)


def _but_for_steps(cells: Sequence[Cell]) -> set[str]:
    return {re.sub(r", \d+ steps\b", "", cell.name) for cell in cells}


def test_the_page_has_tables_figures_and_a_command_of_every_experiment_and_of_no_other() -> None:
    page, names = EVALUATION.read_text(encoding="utf-8"), [it.name for it in experiments()]
    assert len(re.findall("<!-- (?:table|end)", page)) == 2 * len(PLACE.findall(page))
    assert list(dict.fromkeys(re.findall(r"<!-- table: ([a-z0-9-]+)/", page))) == names
    for figure in re.findall(r"\(figures/([^)]+)\)", page):
        assert any(figure.startswith(f"{name}-") for name in names), f"{figure} is of no experiment"
    lines = re.findall(r"^python -m benchmarks\.evaluation (.+)$", page, re.MULTILINE)
    asked = [command._parser().parse_args(shlex.split(line, comments=True)) for line in lines]
    assert list(dict.fromkeys(it.names[0] for it in asked if len(it.names) == 1)) == names
    for options in asked:
        experiments(options.names)  # raises for a name that there is not


@pytest.mark.parametrize("experiment", experiments(), ids=lambda one: one.name)
def test_a_section_of_the_page_asks_the_question_of_its_experiment(experiment: Experiment) -> None:
    _, _, section = EVALUATION.read_text(encoding="utf-8").partition(f"\n## {experiment.title}\n\n")
    assert section.startswith(f"{experiment.question}\n")


def _tiny(quick: bool) -> list[Cell]:
    from tinywork import work  # type: ignore[import-not-found]

    return [Cell("tiny", work, {"tokens": 300, "seconds": 7})]


def _value(results: Any) -> float:
    (result,) = results
    return float(result.values["tokens_per_second"])


@dataclass
class _Drawn:
    value: float

    def svg(self) -> str:
        return f"<svg>{self.value:.6f}</svg>\n"


def _tiny_found(results: Any) -> Found:
    table = Table("what", (Column("throughput", ".6f", "tokens/s"),), {"tiny": (_value(results),)})
    return Found({"all": table}, {"all": _Drawn(_value(results))})


TINY = Experiment("tiny", "A tiny one", "Does it run?", _tiny, _tiny_found)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """One small experiment, a page with a place for its table, and nothing kept."""
    (tmp_path / "tinywork").mkdir()
    (tmp_path / "tinywork" / "__init__.py").write_text(
        "def work(tokens, seconds):\n    return {'tokens_per_second': tokens / seconds}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(command, "experiments", lambda names=(): (TINY,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "page.md").write_text("above\n<!-- table: tiny/all -->\n<!-- end -->\nbelow\n")
    (tmp_path / "figures").mkdir()
    yield tmp_path
    sys.modules.pop("tinywork", None)


def test_one_command_runs_and_writes_everything(tiny: Path) -> None:
    page, rows = tiny / "page.md", tiny / "rows.json"
    asked = ["--processes", "1", "--json", str(rows), "--markdown", str(page), "--figures", str(tiny / "figures")]
    assert command.main(asked) == 0
    first = page.read_text(), rows.read_text(), (tiny / "figures" / "tiny-all.svg").read_text()
    (row,) = map(json.loads, first[1].splitlines())
    assert row["value"] == pytest.approx(300 / 7)
    table = f"| what | throughput |\n| --- | ---: |\n| tiny | {row['value']:.6f} |"
    assert first[0] == f"above\n<!-- table: tiny/all -->\n\n{table}\n\n<!-- end -->\nbelow\n"
    assert first[2] == f"<svg>{row['value']:.6f}</svg>\n"
    assert command.main(asked) == 0  # from what was kept: the same, to the byte
    assert first == (page.read_text(), rows.read_text(), (tiny / "figures" / "tiny-all.svg").read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes is 0; give 1 or more"),
        (["--markdown", "missing.md"], "missing.md is no file"),
        (["--quick", "--markdown", "page.md"], "a first look is not for the page"),
        (["--figures", "missing"], "missing is no folder"),
        (["--json", "missing/rows.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tiny)
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tiny / "cache").exists()


def test_a_list_runs_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert "tiny: Does it run?" in capsys.readouterr().out
    assert not (tiny / "cache").exists()
