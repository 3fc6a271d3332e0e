"""`libra plan` and `libra explain` where more is asked for than a plan: other solvers, pipes, logs that mislead."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from libra.cli import output
from libra.cli.app import app
from libra.cli.output import check_writable, reading
from libra.plan import plan as plans
from libra.plan.plan import Confirmation, DisagreementError, Plan, parse_plan
from libra.report.tables import trace_tables
from libra.trajectory import Trajectory, Turn
from libra.trajectory.statistics import trace_stats

CLUSTER = {"nodes": [{"name": "a800", "count": 2, "gpus": 8, "gpu": "A800", "inter_bandwidth": "200 Gb/s"}]}
REQUEST = {"batch": 64, "samples_per_prompt": 8, "max_length": 8192}


def turn(**changes: object) -> dict[str, Any]:
    return {
        "generated_tokens": 40, "tool": "search", "status": "ok", "returned_tokens": 80, "tool_seconds": 0.5, **changes
    }  # fmt: skip


def log(directory: Path, **changes: object) -> Path:
    """Twenty trajectories of two turns; `changes` are of the tool call of the last one."""
    records = [
        {
            "id": f"t{k}", "prompt_id": "p", "task": "qa", "prompt_tokens": 100, "reward": 1.0, "policy_version": 0,
            "finished": True,
            "turns": [
                turn(**(changes if k == 19 else {})),
                turn(tool=None, status=None, returned_tokens=0, tool_seconds=None),
            ],
        }
        for k in range(20)
    ]  # fmt: skip
    path = directory / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def plan(directory: Path, *options: object, trajectories: Path | None = None) -> Result:
    for name, content in (("cluster.yaml", CLUSTER), ("request.yaml", REQUEST)):
        (directory / name).write_text(yaml.safe_dump(content))
    asked = ("plan", directory / "cluster.yaml", "-m", "Qwen/Qwen3-0.6B", "-t", trajectories or log(directory))
    given = (*asked, "-r", directory / "request.yaml", "-p", "roofline", *options)
    return CliRunner().invoke(app, [str(argument) for argument in given])


def test_a_dash_is_standard_output_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = plan(tmp_path, "-o", "-")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == plan(tmp_path, "--json").stdout
    parse_plan(result.stdout)
    assert not (tmp_path / "-").exists()


def test_an_output_that_is_no_stream_refuses_the_dash() -> None:
    with pytest.raises(ValueError, match=r"-: this output goes to a file only"):
        check_writable(Path("-"))


@pytest.mark.parametrize(("first", "second"), [("cp-sat", "ilp"), ("ilp", "cp-sat")])
def test_a_plan_is_confirmed_by_the_other_solver_with_both_values(tmp_path: Path, first: str, second: str) -> None:
    result = plan(tmp_path, "--solver", first, "--confirm", "--json")
    assert result.exit_code == 0, result.stderr
    step = f"{parse_plan(result.stdout).predicted.step:,.4f} s"
    assert f"note: confirmed: {first} has a step of {step}" in result.stderr
    assert f"{second} has {step}" in result.stderr


def test_both_solvers_make_the_same_plan(tmp_path: Path) -> None:
    found = [parse_plan(plan(tmp_path, "--solver", solver, "--json").stdout) for solver in ("cp-sat", "ilp")]
    assert found[0].allocation == found[1].allocation
    assert found[0].predicted == found[1].predicted


def test_solvers_that_disagree_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disagrees(plan: Plan, solver: str) -> Confirmation:
        raise DisagreementError("cp-sat is wrong")

    monkeypatch.setattr(plans, "confirm", disagrees)
    result = plan(tmp_path, "--confirm")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "libra: cp-sat is wrong\n")


def test_without_the_extra_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "libra.plan.model.ilp", raising=False)
    monkeypatch.setitem(sys.modules, "pulp", None)
    result = plan(tmp_path, "--solver", "ilp")
    assert result.exit_code == 2
    assert "pip install 'libra-rl[ilp]'" in result.stderr


def test_pauses_of_people_are_said_to_bind_the_step_and_can_be_cut(tmp_path: Path) -> None:
    trajectories = log(tmp_path, tool_seconds=25_200.0)
    bound = plan(tmp_path, "--json", trajectories=trajectories)
    assert "the longest tool call of the log took 7 h 00 min" in bound.stderr
    assert "--longest-tool-call SECONDS" in bound.stderr
    cut = plan(tmp_path, "--json", "--longest-tool-call", 60, trajectories=trajectories)
    assert cut.stderr == "note: 1 tool call of more than 1 min 00 s counted as so long\n"
    assert parse_plan(cut.stdout).predicted.step < parse_plan(bound.stdout).predicted.step / 10


def test_long_logs_show_that_they_are_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_SIGN_OF_LIFE", 2)
    assert list(reading(tmp_path, iter("abcde"), "trajectories")) == list("abcde")
    assert capsys.readouterr().err == "".join(f"libra: {tmp_path}: {count} trajectories read\n" for count in (2, 4))


def made(tools: list[str]) -> list[Trajectory]:
    turns = tuple(Turn(5, tool, "ok", 3, 0.5) for tool in tools)
    return [Trajectory("t", "p", "\x1b]0;task\x07", 10, (*turns, Turn(2, None, None, 0)), None, 0, finished=True)]


def shown(tools: list[str], width: int = 80) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    for table in trace_tables(trace_stats(made(tools))):
        console.print(table)
    return console.export_text()


def test_names_in_a_log_cannot_control_the_terminal() -> None:
    text = shown(["\x1b[2Jgone"], width=200)
    assert not {"\x1b", "\x07"} & set(text)
    assert r"\x1b[2Jgone" in text and r"\x1b]0;task\x07" in text


def test_tools_with_a_long_common_prefix_can_be_told_apart() -> None:
    text = shown([f"mcp__filesystem__read_multiple_files_{end}" for end in ("first", "other")])
    assert "…" not in text
    first_column = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│"))
    assert "files_first" in first_column and "files_other" in first_column


def test_a_refusal_that_quotes_a_log_cannot_control_the_terminal(tmp_path: Path) -> None:
    result = plan(tmp_path, trajectories=tmp_path / "a\x1b[2Jb")
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr and r"a\x1b[2Jb" in result.stderr
