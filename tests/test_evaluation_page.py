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
from oracles.evaluation_page import require_found, require_places

from benchmarks.evaluation import __main__ as command
from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.engines import a800_nodes, engines_of
from benchmarks.evaluation.estimates import Estimate
from benchmarks.evaluation.experiment import MODULES, Experiment, Found, experiments
from benchmarks.evaluation.generation import PROMPT, spread_requests
from benchmarks.evaluation.table import Column, Table
from benchmarks.evaluation.tp_by_length import EXPERIMENT as TP_BY_LENGTH
from benchmarks.evaluation.tp_by_length import crossover
from benchmarks.page import PLACE, with_tables
from libra.config.recipe import Recipe
from libra.hardware.model_file import load_model
from libra.plan.options.engines import engine_kv_tokens

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
    columns = (Column("b"), Column("share", ".1f", "%"), Column("speed", ",.0f", "tokens/s", around=True))
    body = {"x|y": ("1\n2", 0.25, Estimate(1000.0, (900.0, 1100.0))), "z": (None, Estimate(2.0, (1.0, 3.0)), 7)}
    table = Table("a", columns, body, "A note.", "case")
    assert table.markdown().splitlines() == [
        "| a | b | share | speed |",
        "| --- | ---: | ---: | ---: |",
        "| x\\|y | 1 2 | 0.2 % | 1,000 ± 100 |",
        "| z |  | 2.0 (1.0 to 3.0) % | 7 |",
        "",
        "A note.",
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
    with pytest.raises(ValueError, match="did you mean tp-by-length"):
        experiments(["tp-by-lenght"])


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


@pytest.mark.parametrize(("tp", "count"), [(1, 48), (2, 24), (8, 6)])
def test_engines_fill_the_cluster_and_have_the_memory_that_plans_price(tp: int, count: int) -> None:
    model, cluster = load_model("Qwen/Qwen3-14B"), a800_nodes(6)
    recipe = Recipe(batch=512, samples_per_prompt=16, max_length=32_768)
    engines = engines_of(model, cluster, recipe, tp, 64, source="roofline")
    kv = engine_kv_tokens(model, cluster.nodes[0], recipe, tp)
    assert len(engines) == len({engine.name for engine in engines}) == count
    assert {engine.config.kv_blocks * engine.config.block_size for engine in engines} == {kv}
    assert {(engine.config.max_model_len, engine.config.max_num_seqs) for engine in engines} == {(32_768, 64)}


@given(st.integers(0, 20_000), st.integers(1, 20_000), st.integers(0, 9))
def test_requests_are_spread_over_their_range(low: int, width: int, seed: int) -> None:
    high = max(low + width, PROMPT + 1)
    requests = list(spread_requests(50, low, high, seed).start())
    contexts = [request.prompt_tokens + request.output_tokens for request in requests]
    assert all(max(low, PROMPT) < context <= high for context in contexts)
    assert {request.arrival for request in requests} == {0}
    again = [request.output_tokens for request in spread_requests(50, low, high, seed).start()]
    assert again == [request.output_tokens for request in requests]


def test_the_page_has_tables_figures_and_a_command_of_every_experiment_and_of_no_other() -> None:
    page, names = EVALUATION.read_text(encoding="utf-8"), [it.name for it in experiments()]
    assert len(re.findall("<!-- (?:table|end)", page)) == 2 * len(PLACE.findall(page))
    assert list(dict.fromkeys(re.findall(r"<!-- table: ([a-z0-9-]+)/", page))) == names
    for figure in re.findall(r"\(figures/([^)]+)\)", page):
        assert any(figure.startswith(f"{name}-") for name in names), f"{figure} is of no experiment"
    lines = re.findall(r"^python -m benchmarks\.evaluation (.+)$", page, re.MULTILINE)
    asked = [command._parser().parse_args(shlex.split(line, comments=True)) for line in lines]
    assert [it.names for it in asked if len(it.names) == 1] == [[name] for name in names]
    for options in asked:
        experiments(options.names)  # raises for a name that there is not


@pytest.mark.parametrize("experiment", experiments(), ids=lambda one: one.name)
def test_a_section_of_the_page_asks_the_question_of_its_experiment(experiment: Experiment) -> None:
    _, _, section = EVALUATION.read_text(encoding="utf-8").partition(f"\n## {experiment.title}\n\n")
    assert section.startswith(f"{experiment.question}\n")


def _made_up(cell: Cell) -> dict[str, Any]:
    """Throughput that is a power of the arguments, and differs a little by seed."""
    asked = cell.arguments
    tp, seed = asked["tp"], asked["seed"]
    length = (asked["low"] + asked["high"]) / 2
    return {"tokens_per_second": 1e7 / length * (length / 8192) ** (tp / 8) * (1 + seed / 100)}


def test_a_crossing_is_found_where_it_was_put() -> None:
    results = [Result(cell, _made_up(cell), 1.0, found=False) for cell in TP_BY_LENGTH.cells(True)]
    found = require_found(TP_BY_LENGTH, results)
    require_places(TP_BY_LENGTH, found)
    said = "One engine of tp 8 overtakes eight of tp 1 at a mean final context of 8,192 tokens."
    assert [table.note for table in found.tables.values()] == [said] * 2


@pytest.mark.parametrize(
    ("advantages", "length"),
    [
        ([(1, 0.5), (4, 2.0)], 2.0),
        ([(1, 0.25), (4, 2.0), (16, 3.0)], 4 ** (2 / 3)),
        ([(1, 2.0), (4, 0.5), (16, 2.0)], 8.0),  # the last time
        ([(1, 0.5), (4, 1.0)], 4.0),
        ([(1, 1.5), (4, 2.0)], None),
        ([(1, 0.5), (4, 0.9)], None),
    ],
)
def test_a_crossover_is_where_the_advantage_turns_for_good(
    advantages: list[tuple[float, float]], length: float | None
) -> None:
    assert crossover(advantages) == (None if length is None else pytest.approx(length))


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
    assert stopped.value.code == 1
    assert message in capsys.readouterr().err
    assert not (tiny / "cache").exists()


def test_a_list_runs_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert "tiny: Does it run?" in capsys.readouterr().out
    assert not (tiny / "cache").exists()
