"""`libra examples`: the files of the documentation, from a checkout and from a wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from calls import EXAMPLES, assert_refused, libra

ROOT = EXAMPLES.parent


def files(directory: Path) -> dict[str, bytes]:
    return {it.name: it.read_bytes() for it in directory.iterdir() if it.is_file()}


def test_all_examples_are_written(tmp_path: Path) -> None:
    told = libra("examples", tmp_path / "new" / "here")
    assert told.exit_code == 0
    assert files(tmp_path / "new" / "here") == files(EXAMPLES)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "menu.yaml").write_text("mine")
    assert_refused(libra("examples", tmp_path), f"{tmp_path / 'menu.yaml'}: exists already; give another directory")
    assert files(tmp_path) == {"menu.yaml": b"mine"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that this checkout makes, from a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", "dist", "."]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    [made] = (folder / "dist").glob("*.whl")
    return made


def test_a_wheel_has_them(wheel: Path) -> None:
    inside = zipfile.ZipFile(wheel)
    shipped = {Path(name).name: inside.read(name) for name in inside.namelist() if name.startswith("libra/examples/")}
    assert shipped == files(EXAMPLES)


def test_a_wheel_has_its_metadata(wheel: Path) -> None:
    inside = zipfile.ZipFile(wheel)
    [name] = (it for it in inside.namelist() if it.endswith(".dist-info/METADATA"))
    metadata = inside.read(name).decode()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "Classifier: Typing :: Typed" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_examples_of_a_wheel_are_written(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = "from libra.cli.app import app; app(['examples', 'mine'])"
    environment = {"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""}
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert files(tmp_path / "mine") == files(EXAMPLES)
