"""`python -m benchmarks.lending NAME`: each benchmark by its name, and a list of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lending import all
from benchmarks.lending.__main__ import main


def test_benchmarks_are_listed_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr()
    assert "  rules " in listed.out and "  plan " in listed.out and listed.err == ""
    assert main(["rule"]) == 2
    refused = capsys.readouterr()
    assert refused.err.startswith("python -m benchmarks.lending: 'rule' is not one of ") and refused.out == ""


def test_a_name_runs_that_benchmark_on_the_other_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--share", "1.5"])
    assert ended.value.code == 2
    assert "--share is 1.5; a share of the time is above 0 and at most 1" in capsys.readouterr().err


_MADE = """
import json, sys
assert sys.argv[1:3] == {arguments!r}, sys.argv
row = dict(case="the gate", metric="lent", value=0.75, unit="", goal=">= 0.5", met={met})
open(sys.argv[-1], "w").write(json.dumps(row) + "\\n")
"""


@pytest.mark.parametrize(
    ("met", "options", "cases", "status", "told"),
    [
        (
            True,
            [],
            ["made x: the gate"],
            0,
            "made x: 1 rows\nreplays: left out: it replays recorded traffic; give --traffic",
        ),
        (False, [], ["made x: the gate"], 1, ""),
        (True, ["--quick"], [], 0, ""),
        (True, ["--traffic", "f"], ["made x: the gate"], 1, "No module named replays"),
    ],
)
def test_all_rows_are_in_one_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    met: bool,
    options: list[str],
    cases: list[str],
    status: int,
    told: str,
) -> None:
    (tmp_path / "made.py").write_text(_MADE.format(arguments=["x", "--json"], met=met))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(all, "BENCHMARKS", (all.Benchmark("made", ("x",)), all.Benchmark("replays", traffic=True)))
    assert all.main([*options, "--json", str(tmp_path / "rows")]) == status
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["case"] for row in rows] == cases
    assert told in capsys.readouterr().err
