"""The page and the trace of a simulated run that borrows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.made_loans import EVENTS, write_loans
from report.pages import Page, figure, marks, needs_nothing, titles

from libra.lend.records.loan_history import RunClock, run_loans
from libra.lend.sim.lending import LenderOutcome
from libra.lend.sim.tenant import Misses
from libra.report.training_run_page import training_run_page
from libra.report.training_run_trace import write_training_trace
from libra.sim.training_run.outcome import EngineSpan, SimulatedRun, SimulatedStep


@pytest.fixture
def outcome(tmp_path: Path) -> SimulatedRun:
    """Four steps of 2.5 s, of which the trainer computes one, and two lenders."""
    write_loans(tmp_path)
    histories = run_loans(tmp_path, RunClock(EVENTS).seconds, EVENTS)
    steps = tuple(
        SimulatedStep(number, 2.5 * number - 1.0, 2.5 * number, 1.5, 1.0, 8, 900, 1200, 300, 0.5, 1, 2, 2)
        for number in (1, 2, 3, 4)
    )
    none = frozenset[int]()
    lenders = tuple(
        LenderOutcome(
            name=it.name,
            requests=len(it.requests),
            missed=Misses(frozenset(late), none),
            attributable=frozenset(late[:1]),
            lent=5.0,
            away=1.0,
            recalls=1,
            put_out=0,
            uncovered=none,
            ttft=0.2,
            tpot=0.05,
            margin=0.01,
            history=replace(it, blamed=frozenset(late[:1])),
        )
        for it, late in zip(histories, ((1, 2), ()), strict=True)
    )
    engines = tuple(
        EngineSpan(name, up_to, 2.5 * number, 2.5 * (number + 1), busy)
        for number in range(4)
        for name, up_to, busy in (("n-0/0", 1000, 2.5), ("n-0/1", 1000, 1.5), ("n-0/2-3", 8000, 0.5))
    )
    return SimulatedRun("plan", steps, (), 10.0, 40.0, 30.0, 500, 20, 900, 300, 4, 0, lenders, engines)


def test_the_page_has_its_steps_and_what_was_lent(outcome: SimulatedRun) -> None:
    page = training_run_page(outcome, 2.0, "plan.json <b>")
    needs_nothing(page)
    said = Page(page).text
    for words in (
        "4 steps in 10.0 s: 2.50 s a step, +25.0 % against the plan. The trainer computes 40 % of the time. 2 of 5"
        " requests of users missed their SLO.",
        "Lent 50 % of the time of 2 serving devices",
        "Recalled 10.0 % of their time, 2 recalls",
        "Users' requests 5 2 missed their SLO, 1 because of lending, 1 inside the envelope",
        "1 because of lending: served alone they meet their SLO; 1 not because of lending: served alone they miss their"
        " SLO, too.",
        "2 devices lent by the gate",
        "lent-0 1.3 % 0.7 % never 4 2",
    ):
        assert words in said, words
    assert titles(figure(page, "Seconds of a step")).count("optimiser step 2: waits for complete groups 1.5") == 1
    assert marks(figure(page, "Staleness"), "line") == 2
    assert marks(figure(page, "Seconds of a step"), "line") == 1
    assert "The line is the plan's step of 2.00 s." in said
    assert (
        titles(figure(page, "Engines and trainer")).count(
            "n-0/1, contexts up to 1,000: 60 % busy from 2.50 s to 5.00 s"
        )
        == 1
    )
    assert titles(figure(page, "Engines and trainer")).count("trainer: waits 1.50 s before step 2") == 1
    assert "up to 1,000 2 80 % 60 % 100 % up to 8,000 1 20 % 20 % 20 %" in said
    assert (
        "Engines and trainer over time"
        not in Page(training_run_page(replace(outcome, engines=()), 2.0, "plan.json")).text
    )


def test_the_trace_has_its_steps_and_lent_devices(outcome: SimulatedRun, tmp_path: Path) -> None:
    write_training_trace(outcome, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    groups = {it["pid"]: it["args"]["name"] for it in events if it["name"] == "process_name"}
    drawn = [(groups[it["pid"]], it["name"], it["ts"], it["dur"]) for it in events if it["ph"] == "X"]
    assert ("training", "step 2", 4_000_000, 1_000_000) in drawn
    assert ("training", "waits", 2_500_000, 1_500_000) in drawn
    assert ("lent devices", "grant", 2_000_000, 20_000) in drawn
