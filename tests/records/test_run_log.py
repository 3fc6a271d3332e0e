from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.made_run import DECISIONS, MEASURED, MadeRun, write_lines

from libra.records.run_log import latest_words, outcomes, prediction_error, read_run
from libra.records.schema import PeriodRecord, RecordFormatError


def test_a_run_is_read_whole(made_run: MadeRun) -> None:
    log = read_run(made_run.directory)
    assert log.name == "calculator <demo>"
    assert list(log.steps) == made_run.steps
    assert list(log.periods) == made_run.periods
    assert log.decisions == (DECISIONS[0], MEASURED, DECISIONS[2])  # the measured record replaced the first word on it
    assert [event.worker for event in log.losses] == ["w3"]
    assert log.cut_off == ()


def test_what_was_not_written_is_absent(made_run: MadeRun) -> None:
    for name in ("summary.json", "config.json", "periods.jsonl", "decisions.jsonl", "events.jsonl"):
        (made_run.directory / name).unlink()
    log = read_run(made_run.directory)
    assert (log.summary, log.config, log.periods, log.decisions, log.events) == (None, None, (), (), ())
    assert log.name == "run-7"


def test_a_line_cut_off_by_a_kill_is_left_out_and_named(made_run: MadeRun) -> None:
    metrics = made_run.directory / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40])
    log = read_run(made_run.directory)
    assert log.steps == tuple(made_run.steps[:-1])
    assert log.cut_off == ("metrics.jsonl",)


def test_a_broken_line_that_was_finished_is_an_error(made_run: MadeRun) -> None:
    metrics = made_run.directory / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-40] + b"\n")
    with pytest.raises(RecordFormatError, match=r"metrics\.jsonl:120: line"):
        read_run(made_run.directory)


def test_a_last_line_that_lacks_only_its_newline_counts(made_run: MadeRun) -> None:
    metrics = made_run.directory / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-1])
    assert len(read_run(made_run.directory).steps) == 120


def test_steps_made_twice_are_an_error(made_run: MadeRun) -> None:
    write_lines(made_run.directory / "metrics.jsonl", [*made_run.steps[:9], *made_run.steps[5:12]])
    with pytest.raises(RecordFormatError, match=r"step 6 at .* follows step 9"):
        read_run(made_run.directory)


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not the directory of a run"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        read_run(tmp_path / "nothing")


def test_the_latest_word_keeps_the_place_of_the_first() -> None:
    first, second, third = DECISIONS
    assert latest_words([first, second, third, MEASURED]) == (first, MEASURED, third)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([], None),
        ([(2.0, True)], None),
        ([(2.0, False)], 0.25),
        ([(2.0, False), (5.0, False), (1.0, True)], 0.375),
    ],
)
def test_prediction_error_leaves_out_periods_with_a_role_change(
    measured: list[tuple[float, bool]], expected: float | None
) -> None:
    periods = [
        PeriodRecord(i, 1, 2, "train 1", 2.5, seconds, "rollout", switching)
        for i, (seconds, switching) in enumerate(measured)
    ]
    assert prediction_error(periods) == expected


def test_a_decision_is_in_force_until_the_next_one_taken(made_run: MadeRun) -> None:
    log = read_run(made_run.directory)
    first, second = outcomes(log)
    assert (first.steps, second.steps) == (90 - 40, 120 - 90)
    assert first.net_seconds == pytest.approx(0.5 * 50 - 11.4)
    error = prediction_error(log.periods)
    assert error is not None
    assert first.error_seconds == pytest.approx(error * (2.29 + 0.5) * 50)  # of what the old allocation would take
    assert second.error_seconds is None
    assert second.net_seconds is None  # not measured is not zero
    assert outcomes(replace(log, decisions=(DECISIONS[0],))) == ()
    assert outcomes(replace(log, steps=()))[1].steps == 0
