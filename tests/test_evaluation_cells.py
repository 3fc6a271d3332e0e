"""Cells: computed once, found again, computed anew when anything they depend on has changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.evaluation.cells import Cell, CellError, call, canonical, run

WORK = """
import os
from pathlib import Path
from cellwork.helper import FACTOR


def scaled(number, log):
    with open(log, "a") as out:
        out.write(f"{number} {os.getpid()}\\n")
    if number < 0:
        raise ArithmeticError(f"{number} is below zero")
    return {"scaled": FACTOR * number, "pair": (number, 0.5)}


def killed(log):
    os._exit(3)


def read(path):
    return {"text": Path(path).read_text()}


def changing(path, text):
    Path(path).write_text(text)
    return {"text": text}


def listed():
    return [1, 2]


def endless():
    return {"number": float("inf")}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of cell functions, which this process and those of the pool can import."""
    package = tmp_path / "cellwork"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("FACTOR = 2\n")
    (package / "work.py").write_text(WORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a file that changes twice a second must be read each time
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "cellwork"]:
        del sys.modules[name]


def _function(name: str) -> Callable[..., Any]:
    import cellwork.work  # type: ignore[import-not-found]

    found: Callable[..., Any] = getattr(cellwork.work, name)
    return found


def _cells(log: Path, numbers: list[int]) -> list[Cell]:
    return [Cell(f"number {it}", _function("scaled"), {"number": it, "log": str(log)}, cost=abs(it)) for it in numbers]


def _computed(log: Path) -> list[int]:
    return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []


def test_results_come_in_order_and_are_found_again(work: Path, tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    first = run(_cells(log, [3, 1, 3, 2]), progress=False, folder=kept)
    assert [result.values for result in first] == [{"scaled": 2 * it, "pair": [it, 0.5]} for it in (3, 1, 3, 2)]
    assert sorted(_computed(log)) == [1, 2, 3]  # equal calls once
    assert not any(result.found for result in first)
    assert all(result.cpu_seconds >= 0 for result in first)

    second = run(_cells(log, [2, 3, 4]), progress=False, folder=kept)
    assert [result.values["scaled"] for result in second] == [4, 6, 8]
    assert [result.found for result in second] == [True, True, False]
    assert [result.cpu_seconds for result in second[:2]] == [first[3].cpu_seconds, first[0].cpu_seconds]
    assert sorted(_computed(log)) == [1, 2, 3, 4]


def test_a_change_of_code_computes_again(work: Path, tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"

    def scaled() -> tuple[int, bool]:
        (result,) = run(_cells(log, [1]), progress=False, folder=kept)
        return result.values["scaled"], result.found

    assert scaled() == (2, False)
    (work / "unrelated.py").write_text("FACTOR = 4\n")
    assert scaled() == (2, True)
    (work / "helper.py").write_text("FACTOR = 3\n")  # imported by the function's module
    assert scaled() == (3, False)
    (work / "helper.py").write_text("FACTOR = 2\n")
    assert scaled() == (2, True)


def test_a_change_of_an_input_computes_again(work: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"

    def read() -> tuple[Any, bool]:
        (result,) = run(
            [Cell("read", _function("read"), {"path": str(text)}, (text,))], progress=False, folder=tmp_path / "kept"
        )
        return result.values["text"], result.found

    text.write_text("one")
    assert read() == ("one", False)
    assert read() == ("one", True)
    text.write_text("two")
    assert read() == ("two", False)


def test_what_changes_while_it_is_computed_is_not_kept(work: Path, tmp_path: Path) -> None:
    text, kept = tmp_path / "text", tmp_path / "kept"
    text.write_text("before")
    cell = Cell("change", _function("changing"), {"path": str(text), "text": "after"}, (text,))
    with pytest.raises(CellError, match="cell change: its code or an input changed while it ran"):
        run([cell], progress=False, folder=kept)
    assert list(kept.iterdir()) == []


def test_the_longest_start_first_until_one_raises_and_what_finished_stays(work: Path, tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    with pytest.raises(CellError, match=r"(?s)cell number -5 failed:.*in scaled.*ArithmeticError: -5 is below zero"):
        run(_cells(log, [3, 7, -5, 9, 2]), processes=1, progress=False, folder=kept)
    assert _computed(log)[:3] == [9, 7, -5]
    assert len({line.split()[1] for line in log.read_text().splitlines()}) == 1  # one process
    assert all(result.found for result in run(_cells(log, [7, 9]), progress=False, folder=kept))


def test_what_runs_beside_a_cell_that_raises_is_kept(work: Path, tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    with pytest.raises(CellError, match="number -9"):
        run(_cells(log, [-9, 8]), processes=2, progress=False, folder=kept)
    assert run(_cells(log, [8]), progress=False, folder=kept)[0].found


def test_a_process_that_is_killed_is_told_with_what_it_ran(work: Path, tmp_path: Path) -> None:
    cell = Cell("hopeless", _function("killed"), {"log": ""})
    with pytest.raises(CellError, match="a process was killed"):
        run([cell], progress=False, folder=tmp_path / "kept")


@pytest.mark.parametrize(("name", "message"), [("listed", "returned a list; return a dict"), ("endless", "not JSON")])
def test_results_must_be_dicts_of_json(work: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Cell(name, _function(name), {}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"[" * 100_000,
        *(lambda _, text=text: text for text in (b"", b"[]", b"{}", b"null", b'{"values": {}}')),
    ],
)
def test_a_damaged_file_counts_as_not_there(work: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    run(_cells(log, [7]), progress=False, folder=kept)
    (path,) = kept.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    (again,) = run(_cells(log, [7]), progress=False, folder=kept)
    assert (again.values["scaled"], again.found) == (14, False)


def test_a_file_says_whose_result_it_is(work: Path, tmp_path: Path) -> None:
    run(_cells(tmp_path / "log", [7]), progress=False, folder=tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    told = json.loads(path.read_text())
    assert (told["name"], told["function"]) == ("number 7", "cellwork.work:scaled")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="set XDG_CACHE_HOME"):
        run([], folder=tmp_path / "file" / "kept")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_canonical_text_is_one_of_its_value(value: dict[str, Any]) -> None:
    text = canonical(value, "value")
    assert json.loads(text) == value
    assert canonical(dict(reversed(value.items())), "value") == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"function": lambda: {}}, "give a top-level function"),
        ({"function": Path.exists}, "give a top-level function"),
        ({"arguments": {"pair": (1, 2)}}, "give lists instead of tuples"),
        ({"arguments": {"by_number": {1: 2}}}, "strings as keys"),
        ({"arguments": {"number": float("nan")}}, "cell one: arguments: Out of range float values"),
        ({"arguments": {"path": Path()}}, "cell one: arguments: Object of type PosixPath"),
    ],
)
def test_a_cell_that_cannot_be_kept_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cell(**{"name": "one", "function": json.dumps, "arguments": {}, **changes})
