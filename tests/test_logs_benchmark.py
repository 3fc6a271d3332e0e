"""`python -m benchmarks.logs`: plain sums of a file beside Libra's, and a line where a file is absent or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.logs import QUANTITIES, TRACES, main
from tests.trajectory.logs.samples import OPENAI, VIDUR


def test_sums_stand_beside_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / TRACES, tmp_path / "rows.jsonl"
    folder.mkdir(parents=True)
    (folder / "vidur.csv").write_bytes(VIDUR)
    (folder / "openai_messages.jsonl").write_bytes(OPENAI)
    assert main(["--data", str(tmp_path), "--json", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["format"], row["right"], row["ours"], row["error"]) for row in rows] == [
        ("vidur", 610, 610, 0),
        ("vidur", 81, 81, 0),
        ("openai", 181, 181, 0),
        ("openai", 24, 24, 0),
    ]
    assert capsys.readouterr().out.count("not there, left out") == len(QUANTITIES) - 2


def test_a_refused_log_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / TRACES).mkdir(parents=True)
    (tmp_path / TRACES / "mooncake.jsonl").write_text('{"timestamp": 0, "input_length": -1, "output_length": 1}\n')
    assert main(["--data", str(tmp_path)]) == 1
    assert "mooncake.jsonl:1: input_length: -1 is not a number of tokens" in capsys.readouterr().out
