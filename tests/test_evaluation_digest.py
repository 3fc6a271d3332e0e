"""What a module's digest depends on: every file that it can reach by imports, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.evaluation.digest import digest, imported, versions

FILES = {
    "__init__.py": "",
    "a.py": "import pack.b\n",
    "b.py": "from pack import c\nfrom . import d\n",
    "c.py": "def later():\n    from .sub import deep\n",
    "d.py": "import numpy, json\nfrom __future__ import annotations\n",
    "sub/__init__.py": "from ..e import thing\n",
    "sub/deep.py": "from .sibling import x\nfrom pack import a\n",  # a circle
    "sub/sibling.py": "x = 1\n",
    "e.py": "thing = 2\n",
    "alone.py": "import pack.nothing_of_this_name\n",
}


def _write(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("module", "reached"),
    [
        (
            "pack.a",
            ["pack", "pack.a", "pack.b", "pack.c", "pack.d", "pack.e", "pack.sub", "pack.sub.deep", "pack.sub.sibling"],
        ),
        ("pack.d", ["pack", "pack.d"]),
        ("pack.sub.sibling", ["pack", "pack.e", "pack.sub", "pack.sub.sibling"]),
        ("pack.alone", ["pack", "pack.alone"]),
        ("pack", ["pack"]),
    ],
)
def test_imports_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, reached: list[str]) -> None:
    _write(tmp_path / "pack")
    monkeypatch.syspath_prepend(tmp_path)
    found = imported(module, ("pack",))
    assert sorted(found) == reached
    assert all(path.is_file() for path in found.values())


def test_inputs_count_by_their_contents_and_order(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("1")
    other.write_text("2")
    digests = {digest("libra.config.units", files) for files in ([], [one], [other], [one, other], [other, one])}
    assert len(digests) == 5


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"workload\.json: No such file"):
        digest("libra.config.units", [tmp_path / "workload.json"])


@pytest.mark.parametrize("module", ["elsewhere.module", "pack.missing"])
def test_a_module_of_no_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    _write(tmp_path / "pack")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"there is no module {module} in pack"):
        imported(module, ("pack",))


def test_nothing_that_python_imports_is_missed() -> None:
    """Whatever a new interpreter has loaded of our packages after the import was found without running anything."""
    program = (
        "import sys, libra.plan.options.layouts; print(*(name for name in sys.modules if name.startswith('libra')))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    found = set(imported("libra.plan.options.layouts", ("libra",)))
    assert len(loaded) > 15
    assert set(loaded) <= found


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefg"), st.sets(st.sampled_from("abcdefg"), max_size=3), min_size=1))
def test_reached_is_the_closure_of_the_imports(
    tmp_path_factory: pytest.TempPathFactory, imports: dict[str, set[str]]
) -> None:
    folder = tmp_path_factory.mktemp("random") / "pack"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, others in imports.items():
        (folder / f"{name}.py").write_text("".join(f"from pack import {other}\n" for other in sorted(others)))
    start = min(imports)
    reached, left = set(), [start]
    while left:
        name = left.pop()
        if name in imports and name not in reached:
            reached.add(name)
            left += imports[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(folder.parent)
        found = imported(f"pack.{start}", ("pack",))
    assert set(found) == {"pack", *(f"pack.{name}" for name in reached)}


def test_versions_of_what_computes_are_told() -> None:
    assert set(versions()) == {"python", "numpy", "ortools", "aiconfigurator-core"}
    assert versions()["numpy"][0].isdigit()
