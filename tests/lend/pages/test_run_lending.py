"""What the page of a run shows of lending: the numbers of its records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes.made_loans import EVENTS, LOANS, write_loans
from fakes.made_run import make_steps, make_summary, write_lines, write_run
from report.pages import Page, figure, marks, needs_nothing, titles

from libra.lend.pages.lending_figures import binned, covered
from libra.records.schema import LendingSummary, ServedSummary
from libra.report.run_page import render_report

SUMMARY = LendingSummary("gate", 0.5, 3, 1, 1, ServedSummary(5, 2, 0.6, 0.01))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("lent") / "run"
    write_run(directory, 6)
    steps = [replace(step, loans=LOANS) for step in make_steps(6)]
    write_lines(directory / "metrics.jsonl", steps)
    write_lines(directory / "events.jsonl", EVENTS)
    (directory / "summary.json").write_text(replace(make_summary(steps), lending=SUMMARY).to_json())
    write_loans(directory)
    return render_report(directory)


def test_the_page_says_what_lending_gave_and_cost(source: str) -> None:
    needs_nothing(source)
    said = Page(source).text
    for words in (
        "Rollout had the lent devices for 50 % of the time it wanted them; 2 of 5 requests of users missed their SLO.",
        "2 devices lent by the gate, at a pace of 80 ms a token (SLO: 500 ms to the first token, 100 ms a token);"
        " grants of up to 40 ms.",
        # from the first step that is recorded, at 1 s, to the last, which ends at 4.01 s: 40 of 3010 ms
        "lent-0 1.3 % 0.7 % never 4 2",
        "lent-1 16.6 % 0.0 % 1 time, 2.50 s 1 0",
        "Device Granted and used Held too long Refused: a token is due Refused: recalled",
        "lent-0 2 1 1 1",
        "2 requests of 5 missed their SLO; 1 not because of lending: nothing had been lent since serving was last idle;"
        " 1 perhaps because of lending: the traffic was not also served alone.",
        "1.90 s lent-0 1: 20 + 11 tokens 600 ms (missed) 10 ms not known",
        "5.00 s lent-0 2: 20 + 11 tokens 700 ms (missed) 10 ms no",
        "6.00 s lent-1 2.50 s 4 requests/s, lent up to 2",
    ):
        assert words in said, words


def test_figures_have_the_numbers_of_the_records(source: str) -> None:
    devices = figure(source, "Device by device")
    assert {"lent-0: 80 % lent", "lent-1: 100 % lent"} <= set(
        titles(devices)
    )  # 20 of a bin's 25 ms, and all of 20 bins
    assert not any("recalled from" in said for said in titles(devices))  # after the last step that is recorded
    assert [said for said in titles(devices) if "missed" in said] == ["request 1 missed its SLO: first token"]
    early = figure(source, "How early tokens came")
    assert "At each of 2 serving steps: time left before the earliest due token. 1 was late." in Page(early).text
    assert [said.split(" (")[0] for said in titles(early) if said.startswith("minimum")] == [
        "minimum: 50",
        "minimum: -10",
    ]
    waited = figure(source, "Latencies of users' requests")
    assert {said.split(" (time")[0] for said in titles(waited) if said.startswith("first")} == {
        "first token (TTFT): 120",  # at 1.9 s
        "first token (TTFT): 20",  # of the other device, at 2 s; what came before and after is not in the figure
    }
    load = figure(source, "Load on serving")
    assert "the most of any device: 50" in " ".join(titles(load))
    weights = figure(source, "Weights of lent engines")
    assert any(said.startswith("furthest behind: 3 (") for said in titles(weights))  # step 6 ends with versions 3 and 4
    assert any(said.startswith("mean: 2.5 (") for said in titles(weights))
    assert marks(weights, "line") == 2


def test_a_run_that_borrows_nothing_shows_nothing_of_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 6)
    assert "What was lent" not in render_report(run.directory)
    served = replace(make_summary(run.steps), lending=replace(SUMMARY, rule="off", share=0.0))
    (run.directory / "summary.json").write_text(served.to_json())
    page = render_report(run.directory)
    assert "Lending (off): nothing was lent; 2 of 5 users" in Page(page).text
    assert "Device by device" not in page


def test_all_time_of_spans_is_in_some_bin() -> None:
    spans = [(0.5, 1.25), (1.25, 1.5), (3.0, 7.0)]
    edges = np.linspace(0.0, 7.0, 11)
    assert float((covered(spans, edges) * np.diff(edges)).sum()) == pytest.approx(5.0)
    assert covered([], edges).tolist() == [0.0] * 10
    assert binned([], edges, np.max) == []


def test_what_agents_lend_is_shown_as_far_as_the_run_knows_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    write_lines(run.directory / "metrics.jsonl", [replace(step, loans=LOANS) for step in run.steps])
    page = render_report(run.directory)
    assert "2 engines; their agents keep the records of the devices." in Page(page).text
    had = titles(figure(page, "Rollout's share of the devices"))
    second = run.steps[1].step_seconds  # of which the engines had 0.375 on average, and wanted 0.75
    assert f"lent: {100 * 0.375 / second:.3g} (optimiser step: 2)" in had
    assert f"wanted: turns to generate: {100 * 0.75 / second:.3g} (optimiser step: 2)" in had
    assert "Device by device" not in page and "Lent devices" not in page
