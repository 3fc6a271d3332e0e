"""A copy of the project without some of its rooms, and its tests made there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")
_ABSENT = "import importlib.util as u, sys; sys.exit(any(u.find_spec('libra.' + room) for room in sys.argv[1:]))"


_EXAMPLES = re.compile(r"max_examples=[\d_]+")
_FEW = "max_examples=10"  # of random cases: whether a module is there does not depend on them
_PROFILE = f"\nsettings.register_profile('few', settings(), {_FEW}, deadline=None)\nsettings.load_profile('few')\n"


class Roomless:
    """The copy, in `target`. With the rooms go their tests, and tests and benchmarks that import what has gone. Tests
    of random cases make few."""

    def __init__(self, rooms: Sequence[str], target: Path) -> None:
        self.target, self._rooms = target, rooms
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(target / "src"), str(target)))}
        for name in _FOLDERS:
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (*ROOT.glob("*.md"), *ROOT.glob("*.py"), ROOT / "pyproject.toml"):
            shutil.copy(path, target / path.name)
        for room in rooms:
            shutil.rmtree(target / "src" / "libra" / room)
            shutil.rmtree(target / "tests" / room)
        self._remove_importers({f"libra.{room}" for room in rooms})
        for path in (target / "tests").rglob("*.py"):
            path.write_text(_EXAMPLES.sub(_FEW, path.read_text(encoding="utf-8")), encoding="utf-8")
        with (target / "tests" / "conftest.py").open("a", encoding="utf-8") as file:
            file.write(_PROFILE)

    def _remove_importers(self, gone: set[str]) -> None:
        while gone:
            names = "|".join(map(re.escape, sorted(gone)))
            imports = re.compile(rf"^\s*(?:from|import) (?:{names})\b", re.MULTILINE)
            gone = set()
            for folder in ("benchmarks", "tests"):
                for path in (self.target / folder).rglob("*.py"):
                    if imports.search(path.read_text(encoding="utf-8")):
                        module = ".".join(path.relative_to(self.target).with_suffix("").parts)
                        gone |= {module, module.removeprefix("tests.")}  # oracles and fakes go by both names
                        path.unlink()

    def test(self, *arguments: str, seconds: float) -> None:
        """Make tests in the copy, whose Python finds no room that was removed. They may take `seconds`."""
        for command in (
            ["-c", _ABSENT, *self._rooms],
            ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments],
        ):
            ran = subprocess.run(
                [sys.executable, *command],
                cwd=self.target,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
            assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
