"""`python -m benchmarks.lending NAME`: each benchmark by its name, and a list of them."""

from __future__ import annotations

import pytest

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
