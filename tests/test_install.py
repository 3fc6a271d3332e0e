"""What `make setup` refuses before it downloads anything, and what it shows of what pip does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "tools" / "install.py"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"python": (3, 14)}, ""),
        ({"processor": "aarch64", "flags": frozenset({"asimd"})}, ""),
        ({"python": (3, 8)}, "Python 3.11 to 3.14 is needed and this is 3.8: make PYTHON=/path/to/python3.11"),
        ({"python": (3, 15)}, "Python 3.11 to 3.14 is needed and this is 3.15: make PYTHON=/path/to/python3.11"),
        ({"system": "Darwin", "libc": ("",)}, "Darwin cannot run the workers: use Linux"),
        ({"processor": "riscv64"}, "there are no engines for riscv64 processors: use x86_64 or aarch64"),
        ({"flags": frozenset({"avx"})}, "the engines need a processor with AVX2, which this one does not have"),
        ({"libc": ("glibc", 2, 27)}, "the engines need glibc 2.28 or newer, and here is glibc 2.27: use a newer"),
        ({"libc": ("",)}, "the engines need glibc 2.28 or newer, and here is another C library: use a newer Linux"),
        ({"free": 1.5e9}, "5.8 GB of disk are needed and 1.5 GB are free: free some, or make VENV=/path/on/another"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(install: ModuleType, change: dict[str, Any], message: str) -> None:
    machine = install.Machine((3, 11), "Linux", "x86_64", ("glibc", 2, 31), frozenset({"avx", "avx2"}), 50e9)
    found = install.refusal(machine._replace(**change))
    assert found.startswith(message) if message else found == ""
    assert "\n" not in found


def test_this_machine_can_do_it(install: ModuleType, tmp_path: Path) -> None:
    """These tests run, so its Python, processor and C library do."""
    machine = install.this_machine(tmp_path / "not" / "yet" / "there")
    assert machine.python == sys.version_info[:2] and machine.free > 0
    assert install.refusal(machine._replace(free=50e9)) == ""


def test_progress_is_told_from_what_pip_prints(install: ModuleType, tmp_path: Path) -> None:
    progress = install.Progress(tmp_path, terminal=False)

    def after(*lines: str) -> str:
        for line in lines:
            progress.read(line + "\n")
        words: str = progress.words()
        return words.split(" s  ", 1)[1]

    assert after() == "looking up what is needed"
    assert after("WARNING: Retrying (Retry(total=4))", "Collecting numpy>=2.0") == "looking up what is needed"
    assert after("  Downloading numpy-2.4.0-cp311-cp311-linux_x86_64.whl (16.5 MB)") == (
        f"downloading numpy, 16.5 MB; 0.0 of about {install.DOWNLOAD_GB} GB so far"
    )
    assert after("  Using cached triton-3.5-cp311-cp311-linux_x86_64.whl (1.2 GB)") == (
        f"downloading triton, 1.2 GB; 1.2 of about {install.DOWNLOAD_GB} GB so far"
    )
    assert after("Installing collected packages: numpy, triton") == "installing, 0 of 2 packages"
    (tmp_path / "numpy-2.4.0.dist-info").mkdir()
    assert after() == "installing, 1 of 2 packages"
