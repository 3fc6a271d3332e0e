"""The benchmark of a GPU on CPU: all of it but the device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "benchmarks.gpu"]
REPOSITORY = Path(__file__).parents[2]


def test_every_command_works_without_a_gpu(tmp_path: Path) -> None:
    found = tmp_path / "rows.jsonl"
    parts = ["engines", "train", "weights", "join", "roles", "sharded"]  # tests of small runs do what the others do
    done = subprocess.run(
        [*COMMAND, "--dry-run", *parts, "--json", str(found)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    judged = [row for row in rows if row["goal"] is not None]
    assert len(judged) == 10 and all(row["met"] for row in judged)


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.gpu.__main__ import main

    monkeypatch.setattr("benchmarks.gpu.__main__.inventory", lambda: ())
    monkeypatch.setattr("benchmarks.gpu.__main__.PARTS", {"engines": lambda *_: pytest.fail("it was begun")})
    for arguments, message in (
        (["--gpu", "3"], "GPU 3 is not there"),
        (["--gpu", "0,3"], "GPU 0 is not there"),
        (["--dry-run", "--gpu", "0,1,2"], "give one GPU, or two"),
        (["--dry-run", "engine"], "engine is no part"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_a_part_that_fails_keeps_no_other_from_its_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from benchmarks.gpu import __main__ as command
    from benchmarks.gpu.setting import Setting
    from benchmarks.rows import Row

    def broken(setting: Setting, directory: Path) -> list[Row]:
        (directory / "worker.log").write_text("out of memory")
        raise RuntimeError("worker is lost")

    parts = {"broken": broken, "whole": lambda *_: [Row("whole", "rows", 1, "")]}
    monkeypatch.setattr(command, "PARTS", parts)
    found = tmp_path / "rows.jsonl"
    assert command.main(["--dry-run", "--json", str(found)]) == 1
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [(row["case"], row.get("met")) for row in rows[1:]] == [("broken", False), ("whole", None)]
    assert "worker is lost" in rows[1]["note"] and "--- worker.log\nout of memory" in capsys.readouterr().err
