"""Interrupted commands: one line and status 130, whichever signal, and however early."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SLOW_IMPORT = """
import sys, time, types
app = types.ModuleType("libra.cli.app")
def main():
    print("begun", file=sys.stderr, flush=True)
    time.sleep(60)
app.main = main
sys.modules["libra.cli.app"] = app
from libra.cli.entry import main
main()
"""
PLAN = (
    *("-m", "libra.cli.entry", "plan", str(EXAMPLES / "cluster_48_a800.yaml"), "--model", "Qwen/Qwen3-14B"),
    *("--trajectories", str(EXAMPLES / "search_agent.jsonl"), "--request", str(EXAMPLES / "request.yaml")),
)


@pytest.mark.parametrize(
    ("command", "number"),
    [(("-c", SLOW_IMPORT), signal.SIGINT), (("-c", SLOW_IMPORT), signal.SIGTERM), (PLAN, signal.SIGINT)],
    ids=["import, INT", "import, TERM", "plan, INT"],
)
def test_an_interrupted_command_says_so(command: tuple[str, ...], number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, first + told
    assert told.splitlines()[-1] == "libra: interrupted" and "Traceback" not in told
