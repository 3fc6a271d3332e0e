"""Commands as a user gives them, and how they refuse."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from click.testing import Result
from typer.testing import CliRunner

from libra.cli.app import app

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG, LOG, PROFILE = (EXAMPLES / name for name in ("calculator.yaml", "trajectories.jsonl", "profile_2_cores.json"))
BASE: dict[str, Any] = yaml.safe_load(CONFIG.read_text())


def libra(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments: object, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "libra.cli.app", *(str(argument) for argument in arguments)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def write(path: Path, data: object) -> Path:
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def changed(**sections: object) -> dict[str, Any]:
    """The example's configuration with keys replaced; sections that are mappings are merged."""
    data = copy.deepcopy(BASE)
    for key, value in sections.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    return data


def assert_refused(result: Result | subprocess.CompletedProcess[str], *words: str, status: int = 2) -> None:
    """In one line, which begins as all do and has these words in it."""
    code = result.returncode if isinstance(result, subprocess.CompletedProcess) else result.exit_code
    assert code == status, result.stderr
    for message in words:
        assert message in result.stderr, result.stderr
    assert result.stderr.startswith("libra: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
