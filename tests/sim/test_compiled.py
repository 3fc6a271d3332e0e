"""The core of the simulator compiled (`make compiled`) against the same modules interpreted: the same bytes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "build/compiled"
CORE = [Path(module) for module in runpy.run_path(str(ROOT / "setup.py"), run_name="listed")["core"]()]
REQUESTS = ["--requests", "examples/requests.jsonl"]
TRAJECTORIES = ["--trajectories", "examples/trajectories.jsonl"]
CASES = {
    "requests to engines alike": ["examples/engines.yaml", *REQUESTS],
    "trajectories, by C-MLFQ": ["examples/engines.yaml", *TRAJECTORIES, "--route", "cmlfq"],
    "every iteration visited": ["examples/engines.yaml", *TRAJECTORIES, "--exact"],
    "prefill and decode apart": ["examples/prefill_decode.yaml", *REQUESTS],
}


def is_built() -> bool:
    """Whether it was built of the present sources: those beside the core, too, which are a copy there."""
    libraries = [
        next((COMPILED / module.relative_to("src")).parent.glob(f"{module.stem}.*.so"), None) for module in CORE
    ]
    copies = [(COMPILED / module.relative_to(ROOT / "src"), module) for module in (ROOT / "src").rglob("*.py")]
    return all(libraries) and all(copy.exists() and copy.read_bytes() == it.read_bytes() for copy, it in copies)


def run(sources: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def test_what_is_to_be_compiled_is_there() -> None:
    assert [module for module in CORE if not (ROOT / module).exists()] == []


@pytest.mark.skipif(not is_built(), reason="build/compiled is not of these sources: make compiled")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled_and_interpreted_give_the_same_bytes(case: list[str]) -> None:
    require_same_bytes(case)
    where = ["-c", "import libra.sim.cluster; print(libra.sim.cluster.__file__)"]
    assert run(COMPILED, *where).strip().endswith(".so")
    assert run(ROOT / "src", *where).strip().endswith(".py")


@pytest.mark.skipif(not is_built(), reason="build/compiled is not of these sources: make compiled")
def test_so_they_do_where_kv_is_pushed(tmp_path: Path) -> None:
    pulled = (ROOT / "examples/prefill_decode.yaml").read_text(encoding="utf-8")
    engines = tmp_path / "engines.yaml"
    engines.write_text(pulled.replace("kv_transfer:\n", "kv_transfer:\n  push: true\n"), encoding="utf-8")
    require_same_bytes([str(engines), *REQUESTS])


def require_same_bytes(case: list[str]) -> None:
    simulate = ["-m", "libra.cli.app", "simulate", *case, "--json"]
    assert run(COMPILED, *simulate) == run(ROOT / "src", *simulate)
