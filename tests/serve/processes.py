"""`libra route` and `libra emulate` as processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from fakes import servers

EXAMPLES = Path(__file__).parents[2] / "examples"
LIBRA = [sys.executable, "-c", "from libra.cli.app import main; main()"]


def start(*words: str, port: int = 0) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A server that answers by the time that this returns, and what it said of itself."""
    server = servers.start("libra.cli.app", *words, "--port", port, "--json", files=256, soft=True)
    return server.process, server.said


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
