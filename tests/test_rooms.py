"""Each room can be taken away: the core plans, runs, routes and simulates without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from libra.config.rooms import ROOMS

ROOT = Path(__file__).parent.parent
SAMPLE = (
    "tests/plan/test_plan.py",
    "tests/route/test_cmlfq_evidence.py",
    "tests/loop/test_process_controller.py",
    "tests/sim/training_run/test_simulated_changes.py",
)


def without(room: str, target: Path) -> None:
    """Copy the project without a room, its tests, and what else imports it outside the package."""
    for part in ("src", "tests", "benchmarks", "examples", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, target / part)
    shutil.rmtree(target / "src" / "libra" / room)
    shutil.rmtree(target / "tests" / room)
    imports = re.compile(rf"^\s*(from|import) (libra|tests)\.{room}\b", re.MULTILINE)
    for folder in ("tests", "benchmarks"):
        for path in (target / folder).rglob("*.py"):
            if imports.search(path.read_text(encoding="utf-8")):
                path.unlink()


@pytest.mark.parametrize("room", ROOMS)
def test_the_core_works_without_a_room(room: str, tmp_path: Path) -> None:
    without(room, tmp_path)
    sample = [path for path in SAMPLE if (tmp_path / path).exists()]
    assert sample == list(SAMPLE), "a sample imports the room"
    paths = os.pathsep.join((str(tmp_path / "src"), str(tmp_path)))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not integration", *sample],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
