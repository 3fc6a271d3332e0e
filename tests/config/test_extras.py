"""The command that installs an extra, for each way in which Libra can be installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from libra.config.extras import LIBRARIES, command

ROOT = Path(__file__).resolve().parents[2]
GIT = {"url": "https://example.org/libra.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
DECLARED = {
    "aiconfigurator_core": "aiconfigurator-core",
    "prometheus_client": "prometheus-client",
    "vl_convert": "vl-convert-python",
    "torch": "vllm",  # a dependency of what is declared
    "markupsafe": "jinja2",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}


def test_a_checkout_is_named_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    expected = f"pip install -e '{tmp_path}[report]'"
    assert command("report", tmp_path, None) == expected
    assert command("report", tmp_path, {"url": "file:///elsewhere"}) == expected


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, "pip install 'libra-rl[ilp]'"),
        (GIT, "pip install 'libra-rl[ilp] @ git+https://example.org/libra.git@abc'"),
        ({"url": "file:///nowhere/libra_rl-0.1.0-py3-none-any.whl"}, "pip install '.[ilp]' in a checkout of Libra"),
        ({"url": ROOT.as_uri(), "dir_info": {}}, f"pip install 'libra-rl[ilp] @ {ROOT.as_uri()}'"),
    ],
)
def test_a_package_is_named_by_its_origin(tmp_path: Path, direct_url: dict[str, object] | None, expected: str) -> None:
    assert command("ilp", tmp_path, direct_url) == expected


def test_every_library_is_of_the_extra_that_is_named() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def requirements(extra: str) -> str:
        text = " ".join(declared[extra])
        nested = [name for name in declared if name in text.partition("libra-rl[")[2].partition("]")[0].split(",")]
        return " ".join([text, *map(requirements, nested)])

    for extra, libraries in LIBRARIES.items():
        for library in libraries:
            assert DECLARED.get(library, library) in requirements(extra), (extra, library)


def test_a_run_without_its_extra_is_one_line(tmp_path: Path) -> None:
    given = ["run", str(ROOT / "examples/calculator.yaml"), "--directory", str(tmp_path)]
    code = f"import sys; sys.modules['psutil'] = None; from libra.cli.app import app; app({given!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("libra: psutil is not installed: pip install ")
    assert done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir())
