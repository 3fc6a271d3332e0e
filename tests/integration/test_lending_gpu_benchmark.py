"""The benchmark of two engines on a GPU, on CPU: all of it but the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]


def test_each_way_of_sharing_is_measured_with_two_live_engines(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    command = [sys.executable, "-m", "benchmarks.lending", "--rates", "3", "--seconds", "3"]
    found = tmp_path / "rows.jsonl"
    run = subprocess.run(
        [*command, "--cpu", "--json", str(found)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    value = {(row["case"].partition(", ")[2], row["metric"]): row["value"] for row in rows}
    assert {case for case, _ in value} == {"alone", "no gate", "serve first", "gate"}
    assert value["no gate", "rollout"] > 0
    assert ("serve first", "lent") in value and ("alone", "rollout") not in value
    assert value["alone", "requests"] == value["gate", "requests"] > 0
    assert value["gate", "wait for the token, largest"] > 0
    assert "one of " in run.stdout  # its cores


def test_where_there_is_no_gpu_it_says_so() -> None:
    pytest.importorskip("torch")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.lending"],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stderr.count("\n")) == (2, 1) and "sees no GPU" in run.stderr
