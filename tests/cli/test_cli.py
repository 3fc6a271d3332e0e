"""The commands as a whole, and `libra trace`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from calls import CONFIG, EXAMPLES, LOG, PROFILE, assert_refused, libra
from typer.core import TyperGroup
from typer.main import get_command

from libra.cli import output
from libra.cli.app import app
from libra.cli.output import check_writable, reading
from libra.config.extras import install_command
from libra.sim.engine import engine


def test_the_version_is_told() -> None:
    told = libra("--version")
    kind = "interpreted" if str(engine.__file__).endswith(".py") else "compiled"
    assert (told.exit_code, told.stdout) == (0, f"libra {version('libra-rl')} (simulator {kind})\n")


def test_help_names_every_command() -> None:
    result = libra("--help")
    assert result.exit_code == 0
    for command in ("run", "plan", "trace"):
        assert command in result.stdout


@pytest.mark.parametrize("command", [("run",), ("plan",), ("trace",), ("trace", "stats")], ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    assert libra(*command, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("pln", "no such command 'pln'. Did you mean 'plan', 'explain'?; see libra --help"),
        ("--versions", "no such option: --versions (Possible options: --version); see libra --help"),
        ("plan --helpp", "no such option: --helpp (Possible options: --help, --html); see libra plan --help"),
        ("plan", "missing option '--trajectories' / '-t'; see libra plan --help"),
        ("trace stats a b", "got unexpected extra argument(s) (b); see libra trace stats --help"),
        ("plan a -t b --seed -1", "invalid value for '--seed': Input should be greater than or equal to 0; see"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments: str, told: str) -> None:
    assert_refused(libra(*arguments.split()), f"libra: {told}")


@pytest.mark.parametrize("group", [(), ("trace",)])
def test_a_group_without_a_command_shows_its_help(group: tuple[str, ...]) -> None:
    result = libra(*group)
    assert result.exit_code == 2 and result.stderr == "" and "Commands" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", CONFIG, "-t", LOG, "-p", PROFILE),
        ("simulate", EXAMPLES / "engines.yaml", "--requests", EXAMPLES / "requests.jsonl"),
    ],
    ids=["plan", "simulate"],
)
def test_it_needs_nothing_that_running_needs(arguments: tuple[object, ...]) -> None:
    code = (
        "import sys\n"
        "from libra.cli.app import app\n"
        f"app({[str(it) for it in arguments]!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'vllm', 'msgspec', 'psutil', 'transformers'} & set(sys.modules)\n"
        "heavy |= {name for name in sys.modules if name.startswith('libra.exec')}\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_planning_never_imports_the_simulator() -> None:
    code = (
        "import sys, pkgutil, importlib, libra.plan, libra.cost\n"
        "for package in (libra.plan, libra.cost):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "sys.exit(any(name.startswith('libra.sim') for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_trace_stats_shows_the_log() -> None:
    result = libra("trace", "stats", LOG)
    assert result.exit_code == 0
    assert "Trajectories" in result.stdout
    assert "60" in result.stdout


def test_trace_stats_as_json() -> None:
    found = json.loads(libra("trace", "stats", LOG, "--json").stdout)
    assert (found["count"], found["finished"], found["turns"]["max"]) == (60, 60, 7)


def test_trace_stats_refuses_a_bad_line_with_file_line_and_field(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(LOG.read_text() + '{"id": "e60"}\n')
    assert_refused(libra("trace", "stats", log), f"{log}:61: prompt_id: ")


def test_trace_stats_refuses_a_log_that_is_not_there_or_empty(tmp_path: Path) -> None:
    assert_refused(libra("trace", "stats", tmp_path / "none"), f"{tmp_path / 'none'}: No such file or directory")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert_refused(libra("trace", "stats", empty), "no trajectories to summarise; give a log with at least one line")


@pytest.mark.parametrize(("command", "file"), [("emulate", "engines.yaml"), ("route", "gateway.yaml")])
def test_a_service_without_its_extra_says_how_to_get_it(command: str, file: str) -> None:
    given = [command, str(EXAMPLES / file)]
    code = f"import sys; sys.modules['aiohttp'] = None; from libra.cli.app import app; app({given!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert_refused(done, f"aiohttp is not installed: {install_command('http')}")


def test_engines_with_roles_are_not_emulated() -> None:
    said = "prefill_decode.yaml: the role of prefill-0 is prefill, but KV transfers between engines are"
    assert_refused(libra("emulate", EXAMPLES / "prefill_decode.yaml"), said)


# Help


def test_every_argument_is_in_capitals_in_the_usage() -> None:
    def commands(group: TyperGroup) -> Iterator[Any]:
        for command in group.commands.values():
            yield from commands(command) if isinstance(command, TyperGroup) else (command,)

    root = get_command(app)
    assert isinstance(root, TyperGroup)
    arguments = [it for command in commands(root) for it in command.params if it.param_type_name == "argument"]
    assert arguments
    assert [it.name for it in arguments if not (it.metavar or "").isupper()] == []


# Outputs and inputs


def test_an_output_that_is_no_stream_refuses_the_dash() -> None:
    with pytest.raises(ValueError, match=r"-: this output goes to a file only"):
        check_writable(Path("-"))


def test_long_logs_show_that_they_are_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_SIGN_OF_LIFE", 2)
    assert list(reading(tmp_path, iter("abcde"), "trajectories")) == list("abcde")
    assert capsys.readouterr().err == "".join(f"libra: {tmp_path}: {count} trajectories read\n" for count in (2, 4))
