"""`libra route` and `libra emulate` as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
LIBRA = [sys.executable, "-c", "from libra.cli.app import main; main()"]
_FEW_FILES = ["bash", "-c", 'ulimit -Sn 256 && exec "$@"', "bash"]  # as a user's shell has it


def start(*words: str, port: int = 0) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A server that answers by the time that this returns, and what it said of itself."""
    command = [*_FEW_FILES, *LIBRA, *words, "--port", str(port), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


@contextmanager
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """A list of processes, which are killed in the end."""
    processes: list[subprocess.Popen[str]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def one_engine(folder: Path) -> Path:
    """A file that describes one engine."""
    described = yaml.safe_load((EXAMPLES / "engines.yaml").read_text(encoding="utf-8"))
    described["engines"][0]["count"] = 1
    file = folder / "engine.yaml"
    file.write_text(yaml.safe_dump(described), encoding="utf-8")
    return file
