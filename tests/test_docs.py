"""What README and docs say, held against the code: commands, options, links, YAML keys, record fields, examples."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from libra.cli.app import app
from libra.config.frameworks import FRAMEWORKS
from libra.config.recipe import Recipe
from libra.config.run import RunConfig
from libra.config.yaml_file import without_null
from libra.environments.protocol import Environment
from libra.hardware.cluster_file import load_cluster
from libra.records.causes import Cause
from libra.records.schema import DecisionRecord, Evaluation, EventRecord, PeriodRecord, RunSummary, StepRecord
from libra.route.catalogue import POLICIES
from libra.sim.engines_keys import EnginesFile
from libra.sim.outcome.definitions import COMPLETED, DEFINITIONS
from libra.sim.outcome.result_file import FIELDS

ROOT = Path(__file__).resolve().parent.parent
RUNNING = ROOT / "docs" / "running.md"
PLANNING = ROOT / "docs" / "planning.md"
SIMULATION = ROOT / "docs" / "simulation.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in _FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def _commands() -> Iterator[tuple[str, list[str]]]:
    """Every `libra ...` command line: in shell blocks, and as code within the text where it has arguments."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for block in _blocks(page, "sh") for line in block.splitlines()]
        lines += re.findall(r"`(libra [^`]+)`", _FENCE.sub("", text))
        for line in lines:
            words = shlex.split(line, comments=True)
            if words and Path(words[0]).name == "libra":
                yield f"{page.name}: {line}", words[1:]


COMMANDS = dict(_commands())


def test_the_docs_show_commands() -> None:
    assert {words[0] for words in COMMANDS.values()} >= {"run", "plan", "simulate", "trace"}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_command_and_its_options_exist(words: list[str]) -> None:
    command, path, rest = get_command(app), [], list(words)
    while isinstance(command, TyperGroup):
        path.append(rest.pop(0))
        assert path[-1] in command.commands, f"no command {' '.join(path)}"
        command = command.commands[path[-1]]
    assert CliRunner().invoke(app, [*path, "--help"]).exit_code == 0
    known = {name for parameter in command.params for name in parameter.opts}
    options = {word.partition("=")[0] for word in rest if word.startswith("-")}
    assert options <= known
    if rest and not rest[0].startswith("-"):  # a whole command line, not just a name in the text
        command.make_context("libra", rest)  # parses the values; raises a usage error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        if anchor:
            headings = _HEADING.findall(_FENCE.sub("", target.read_text(encoding="utf-8")))
            assert anchor in {_anchor(heading) for heading in headings}, f"{link} names no heading"


def _anchor(heading: str) -> str:
    """The name that a heading is linked by, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _config_keys(section: type[BaseModel], prefix: str = "", within: str = "") -> Iterator[tuple[str, Any]]:
    """Every key and its default as JSON, sections opened; without a default "required", or, in a section that need not
    be given, "with `SECTION`"."""
    for name, field in section.model_fields.items():
        inner = next((kind for kind in _kinds(field.annotation) if _is_section(kind)), None)
        if inner is not None:
            several = any(get_origin(kind) in (dict, tuple) for kind in _kinds(field.annotation))
            optional = within if field.is_required() else name
            yield from _config_keys(inner, f"{prefix}{name}." + ("*." if several else ""), optional)
        elif field.is_required():
            yield prefix + name, f"with `{within}`" if within else "required"
        else:
            default = str(field.default) if isinstance(field.default, Path) else field.default
            yield prefix + name, list(default) if isinstance(default, tuple) else default


def _kinds(annotation: Any) -> list[Any]:
    return [without_null(kind) for kind in (annotation, *get_args(annotation))]


def _stated(default: str) -> Any:
    return default if default.startswith("with ") else yaml.safe_load(default.strip("`"))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_the_functions_of_the_walks_exist() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").partition("\n### A request through")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", section)
    assert len(named) > 20
    for file, name in named:
        assert name in set(_defined(ast.parse((ROOT / "src/libra" / file).read_bytes()))), f"{file}:{name}"


def _defined(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Names of a module's functions and classes, and of their methods as `Class.method`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{method}" for method in _defined(node))


def test_the_yaml_keys_are_those_of_the_configuration() -> None:
    section = RUNNING.read_text(encoding="utf-8").partition("\n## The YAML file\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (`[^`]*`|required|with `\w+`) \|", section, re.MULTILINE)
    documented = {key: _stated(default) for key, default in rows}
    assert len(documented) == len(rows), "a key stands there twice"
    assert documented == dict(_config_keys(RunConfig))


def test_the_example_in_the_docs_is_a_configuration() -> None:
    for block in _blocks(RUNNING, "yaml"):
        for name, content in yaml.safe_load(block).items():
            kind = RunConfig.model_fields[name].annotation
            assert isinstance(kind, type) and issubclass(kind, BaseModel)
            kind.model_validate(content)


@pytest.mark.parametrize("record", [StepRecord, PeriodRecord, DecisionRecord, EventRecord, Evaluation, RunSummary])
def test_every_field_of_a_record_is_documented(record: Any) -> None:
    section = RUNNING.read_text(encoding="utf-8").partition("\n### Fields\n")[2].partition("\n## ")[0]
    assert {field.name for field in fields(record)} <= set(re.findall(r"`(\w+)`", section))


def test_every_member_of_an_environment_is_documented() -> None:
    section = RUNNING.read_text(encoding="utf-8").partition("\n## Your own environment\n")[2]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(\w+)", row)]
    assert sorted(documented) == sorted(name for name in vars(Environment) if not name.startswith("_"))


def _readme_example(importing: str) -> str:
    return next(block for block in _blocks(ROOT / "README.md", "python") if importing in block)


@pytest.mark.parametrize(
    ("importing", "printed"),
    [("libra.Planner", "Allocation(replicas="), ("libra.route.catalogue", "Placement(instance='b'")],
)
def test_the_examples_in_the_readme_work(
    importing: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(_readme_example(importing), f"README.md ({importing})", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.startswith(printed)


def test_the_example_in_the_planning_page_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = _blocks(PLANNING, "python")
    exec(compile(example, "planning.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.startswith("Prediction(step=")


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("plan_in_a_loop.py", "-bound, "),
        ("replan_in_a_loop.py", "change: no allocation is running"),
        ("simulate_in_a_script.py", "round-robin: "),
        ("simulate_a_run.py", "least-loaded: "),
    ],
)
def test_the_example_of_a_script_works_and_is_short(name: str, printed: str) -> None:
    path = ROOT / "examples" / name
    finished = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert printed in finished.stdout.splitlines()[0]
    code = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith('"""')]
    assert len(code) < 20


def test_every_cause_of_device_time_is_documented() -> None:
    section = RUNNING.read_text(encoding="utf-8").partition("\n## Why devices were idle\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(Cause)


def test_the_keys_of_a_request_are_those_of_the_recipe() -> None:
    section = PLANNING.read_text(encoding="utf-8").partition("\n**The request**")[2].partition("\n**The traj")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \|([^|]*)\|$", section, re.MULTILINE)
    assert [key for key, _ in rows] == list(dict(_config_keys(Recipe)))
    for key, field in Recipe.model_fields.items():
        stated = dict(rows)[key].strip()
        if field.is_required():
            assert not stated
        elif field.default_factory is None and field.default is not None:
            assert yaml.safe_load(stated.strip("`")) == field.default


def test_the_table_of_frameworks_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    assert rows == [
        (
            name,
            it.restriction or "nothing",
            f"`{it.router}`" if it.router else "none: `cmlfq` of `libra route`",
            it.staleness or "none",
        )
        for name, it in FRAMEWORKS.items()
    ]


def test_the_cluster_in_the_planning_page_is_one(tmp_path: Path) -> None:
    (block,) = _blocks(PLANNING, "yaml")
    path = tmp_path / "cluster.yaml"
    path.write_text(block, encoding="utf-8")
    assert load_cluster(path).devices == 48


def test_the_keys_of_a_file_of_engines_are_documented() -> None:
    section = SIMULATION.read_text(encoding="utf-8").partition("\n## Engines from a file\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (`[^`]*`|required|with `\w+`) \|", section, re.MULTILINE)
    documented = {key: _stated(default) for key, default in rows}
    assert len(documented) == len(rows), "a key stands there twice"
    assert documented == dict(_config_keys(EnginesFile))
    route = next(line for line in section.splitlines() if line.startswith("| `route` "))
    assert set(POLICIES) <= set(re.findall(r"`([^`]+)`", route))


def test_metrics_are_documented_by_their_definitions() -> None:
    section = SIMULATION.read_text(encoding="utf-8").partition("\n### Metrics\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.*) \|$", section, re.MULTILINE)
    assert rows == [(it.key, it.unit, it.text) for it in DEFINITIONS.values()]
    assert COMPLETED in section


def test_every_field_of_a_simulated_request_is_documented() -> None:
    section = SIMULATION.read_text(encoding="utf-8").partition("\n### Requests\n")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)) == FIELDS


def test_the_example_in_the_simulation_page_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = _blocks(SIMULATION, "python")
    exec(compile(example, "simulation.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.startswith("Spread(count=11, ")


def test_the_running_example_imports_what_exists() -> None:
    for statement in ast.walk(ast.parse(_readme_example("libra.loop.run"))):
        if isinstance(statement, ast.ImportFrom):
            assert statement.module is not None
            module = importlib.import_module(statement.module)
            missing = [alias.name for alias in statement.names if not hasattr(module, alias.name)]
            assert not missing, f"{statement.module} has no {', '.join(missing)}"


@pytest.mark.parametrize("figure", sorted((ROOT / "docs" / "figures").glob("*.svg")), ids=lambda path: path.stem)
def test_a_figure_paints_its_whole_sheet_so_that_it_is_legible_on_a_dark_page(figure: Path) -> None:
    svg = figure.read_text(encoding="utf-8")
    width, height = re.findall(r"viewBox=\"0 0 (\S+) (\S+)\"", svg)[0]
    sheets = [
        tag for tag in re.findall(r"<rect [^>]*>", svg) if f'width="{width}"' in tag and f'height="{height}"' in tag
    ]
    assert any(re.search(r'fill[=:]"?#ffffff', tag) for tag in sheets)
