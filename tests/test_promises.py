"""The verdict on what runs promised: errors of settled periods, and changes that lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.made_run import DECISIONS, MEASURED, write_lines, write_run

from benchmarks.promises import change_rows, main, rows_of, together
from libra.records.run_log import RunLog, read_run
from libra.records.schema import DecisionRecord


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run").directory


def judged(directory: Path, decision: DecisionRecord) -> RunLog:
    write_lines(directory / "decisions.jsonl", [DECISIONS[1], decision])
    return read_run(directory)


# (realised gain, its standard error, verdict)
CHANGES = [
    (0.5, 0.1, "gained"),
    (0.1, 0.1, "within its interval"),
    (-0.1, 0.1, "within its interval"),
    (-0.3, 0.1, "lost"),
    (-0.3, None, "not known"),
    (None, None, "not known"),
]


@pytest.mark.parametrize(("gain", "error", "verdict"), CHANGES)
def test_a_change_lost_where_its_loss_exceeds_its_interval(
    directory: Path, gain: float | None, error: float | None, verdict: str
) -> None:
    log = judged(directory, replace(MEASURED, realised_gain_per_step=gain, realised_error=error, price_error=0.1))
    [row] = change_rows(log)
    assert row[-1] == verdict
    assert row[2] == "+0.54 s ± 0.20 s"
    goal = together([log])[-1]
    assert (goal.value, goal.met) == (float(verdict == "lost"), verdict != "lost")


def test_only_settled_periods_count(directory: Path) -> None:
    log = read_run(directory)
    exact = tuple(
        replace(it, predicted_seconds=it.measured_seconds * (9.0 if it.switching else 1.1), priced_seconds=1.0)
        for it in log.periods
    )
    rows = {row.metric: row.value for row in rows_of("run", replace(log, periods=exact))}
    assert rows["settled periods"] == sum(not it.switching for it in log.periods)
    assert rows["mean error of promises"] == pytest.approx(10.0)
    assert rows["largest error of a promise"] == pytest.approx(10.0)
    assert rows["mean error of prices, not corrected"] > 30.0
    assert not together([replace(log, periods=tuple(replace(it, predicted_seconds=9.0) for it in exact))])[0].met
    with pytest.raises(ValueError, match="no period is settled"):
        rows_of("run", replace(log, periods=()))


def test_the_command_prints_and_keeps_the_goals(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{directory}", "--json", f"{tmp_path / 'rows.jsonl'}"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["goal"] for row in rows if row["goal"]] == ["at most 10 %", "none"]
    printed = capsys.readouterr().out
    assert "periods" in printed and "changes" in printed
