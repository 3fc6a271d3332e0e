from __future__ import annotations

import io
import os
from dataclasses import replace
from statistics import fmean

import pytest
from fakes import made_run
from rich.console import Console

from libra.loop.progress import RunProgress, loan_words
from libra.records.schema import StepLoan
from libra.report.live import (
    FIRST_SECONDS,
    LOG_SECONDS,
    PlainDisplay,
    RichDisplay,
    RunView,
    SimulationProgress,
    make_display,
    panel,
)
from libra.report.remaining import RemainingTime
from libra.report.words import duration
from libra.sim.simulate import Elapsed

VIEW = RunView(
    name="calculator",
    step=5,
    steps=20,
    reward=0.41,
    reward_steps=10,
    tokens_per_second=4236.0,
    staleness_mean=0.6,
    staleness_max=2,
    workers=(("w0", "train", "step 6"), ("w1", "rollout:long", "14 turns [bold]")),
    last_decision="train 2 | short 2 → train 1 | short 3",
    phase="training",
    messages=("weights [red]v5[/red]",),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_lines(*views: tuple[float, RunView]) -> list[str]:
    """What is written of views that come so many seconds after the start."""
    out, clock = io.StringIO(), Clock()
    display = PlainDisplay(out, clock=clock)
    for seconds, view in views:
        clock.now = 100.0 + seconds
        display.show(view)
    return out.getvalue().splitlines()


def test_the_stream_chooses_the_display() -> None:
    assert isinstance(make_display(io.StringIO()), PlainDisplay)
    terminal = make_display(Terminal())
    assert isinstance(terminal, RichDisplay)
    terminal.close()


def test_a_plain_line_holds_the_view_and_no_ansi() -> None:
    lines = plain_lines((30.0, VIEW))
    assert lines == [
        "30.0 s  weights [red]v5[/red]",
        "30.0 s  step 5/20  training  reward 0.41 (mean of 10 steps)  4,236 tokens/s  staleness 0.6, max 2"
        "  w0 train, w1 rollout:long",
    ]


def test_views_lines_and_messages_are_of_one_clock() -> None:
    """Whatever they tell of: what is before the first step, a step, a decision, the evaluation afterwards."""
    out, clock = io.StringIO(), Clock()
    display = PlainDisplay(out, clock=clock)
    for step in (1, 2):
        clock.now += 61.0
        display.show(replace(VIEW, step=step, messages=(f"message {step}",)))
        clock.now += 61.0
        display.line("said")
    times = [line.split("  ")[0] for line in out.getvalue().splitlines()]
    assert times == ["1 min 01 s"] * 2 + ["2 min 02 s"] + ["3 min 03 s"] * 2 + ["4 min 04 s"]


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        display = PlainDisplay(stream, every_seconds=0.0)
        for _ in range(3):
            display.show(VIEW)
            display.line("said to nobody")
        display.close()


@pytest.mark.parametrize(
    ("moments", "shown"),
    [
        ([(0, 0.0), (0, 1.0), (0, 4.9)], 1),  # nothing new, and not yet time for a sign of life
        ([(0, 0.0), (0, 5.0), (0, 9.0), (0, 10.0)], 3),
        ([(0, 0.0), (1, 0.1), (2, 0.2)], 3),  # each step
        ([(0, 0.0), (1, 4.0), (1, 8.0), (1, 9.5)], 3),
    ],
)
def test_a_plain_display_writes_on_steps_and_signs_of_life(moments: list[tuple[int, float]], shown: int) -> None:
    views = [(seconds, replace(VIEW, step=step, messages=())) for step, seconds in moments]
    assert len(plain_lines(*views)) == shown


def test_a_plain_display_repeats_no_message_and_loses_none() -> None:
    views = [
        (30.0 + i / 10, replace(VIEW, messages=window)) for i, window in enumerate([("a",), ("a", "b"), ("b", "c")])
    ]
    assert [line[-1] for line in plain_lines(*views) if len(line) < 10] == ["a", "b", "c"]


def test_closing_shows_the_last_view() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    display.show(VIEW)
    display.show(replace(VIEW, phase="saving"))
    assert "saving" not in out.getvalue()
    display.close()
    assert "saving" in out.getvalue()


def test_what_was_not_shown_before_a_line_does_not_come_after_it() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    display.show(VIEW)
    display.show(replace(VIEW, phase="evaluating"))
    display.line("end: accuracy 0.8")
    display.close()
    assert "evaluating" not in out.getvalue()


def test_a_terminal_shows_everything_as_it_was_written() -> None:
    out = Terminal()
    display = RichDisplay(out)
    display.show(VIEW)
    display.line("worker w3 [lost]")
    display.close()
    shown = out.getvalue()
    for words in (
        "calculator",
        "step 5/20",
        "reward 0.41",
        "4,236 tokens/s",
        "rollout:long",
        "14 turns [bold]",
        "train 2 | short 2 → train 1 | short 3",
        "weights [red]v5[/red]",
        "worker w3 [lost]",
    ):
        assert words in shown, words


def test_a_terminal_refreshes_at_most_four_times_a_second() -> None:
    out, clock = Terminal(), Clock()
    display = RichDisplay(out, clock)
    for tick in range(100):
        clock.now = 100.0 + tick / 100
        display.show(replace(VIEW, phase=f"tick-{tick}."))
    shown = out.getvalue()
    assert [tick for tick in range(100) if f"tick-{tick}." in shown] == [0, 25, 50, 75]
    display.show(replace(VIEW, phase="the end"))
    display.close()
    assert "the end" in out.getvalue()


def test_a_view_of_a_run_that_has_not_begun() -> None:
    view = RunView("r", 0, 0, None, 0, None, None, None, (), "", "warm-up 40/120 loss 0.31")
    assert plain_lines((0.0, view)) == ["0.00 s  step 0/0  warm-up 40/120 loss 0.31"]
    out = Terminal()
    display = RichDisplay(out)
    display.show(view)
    display.close()
    assert "warm-up 40/120 loss 0.31" in out.getvalue()


def moments(stream: io.StringIO, clock: Clock, *after: float) -> str:
    """What is shown of moments so many seconds after the start."""
    begun = clock.now
    with SimulationProgress(stream, clock) as progress:
        for number, seconds in enumerate(after):
            clock.now = begun + seconds
            progress(Elapsed(float(number), 10 * number, 9 * number))
    return stream.getvalue()


def test_a_short_simulation_leaves_no_trace() -> None:
    assert moments(io.StringIO(), Clock(), 0.0, 0.5 * LOG_SECONDS) == ""
    assert moments(Terminal(), Clock(), 0.0, 0.5 * FIRST_SECONDS) == ""


def test_a_log_file_gets_a_line_now_and_then() -> None:
    shown = moments(io.StringIO(), Clock(), 1.0, LOG_SECONDS, LOG_SECONDS + 1, 2 * LOG_SECONDS)
    assert shown.splitlines() == [
        "simulated 1.00 s: 9 of 10 requests that arrived have ended",
        "simulated 3.00 s: 27 of 30 requests that arrived have ended",
    ]


def test_a_simulation_that_knows_its_requests_says_how_long_it_will_take() -> None:
    out, clock = io.StringIO(), Clock()
    with SimulationProgress(out, clock, requests=100) as progress:
        for ended in (0, 10, 20, 20, 30, 40):
            clock.now += 0.5 * LOG_SECONDS
            progress(Elapsed(1.0, 50, ended))
    left = duration(3 * LOG_SECONDS * 60 / 40)
    assert out.getvalue().splitlines()[-1] == f"simulated 1.00 s: 40 of 100 requests have ended, about {left} left"
    assert len(out.getvalue().splitlines()) == 3


def test_a_simulation_that_knows_its_steps_says_how_long_it_will_take() -> None:
    out, clock = io.StringIO(), Clock()
    with SimulationProgress(out, clock) as progress:
        for step in range(1, 5):
            clock.now += 6.0
            progress.step(step, 8)
    assert out.getvalue().splitlines() == [
        "simulated step 2 of 8, about 36.0 s left",
        "simulated step 4 of 8, about 24.0 s left",
    ]


def test_the_time_left_follows_the_latest_steps_and_begins_anew_with_another_series() -> None:
    remaining = RemainingTime()
    assert remaining.observe(1, 100, 10.0) is None
    assert remaining.observe(2, 100, 12.0) == 196.0
    left = [remaining.observe(step, 100, 12.0 + 4.0 * (step - 2)) for step in range(3, 40)]
    assert left[-1] == 4.0 * 61
    assert remaining.observe(1, 50, 200.0) is None


def test_the_time_left_is_unknown_while_an_estimated_total_falls() -> None:
    remaining = RemainingTime(estimated=True)
    totals = [0, 1000, 1000, 300, 100] + [100] * 60
    left = [remaining.observe(done, total, float(done)) for done, total in enumerate(totals)]
    assert left[:14] == [None] * 14 and left[14:] == [100.0 - done for done in range(14, 65)]
    assert remaining.observe(65, 95, 65.0) == 30.0  # a total may drift
    assert remaining.observe(66, 80, 66.0) is None


def test_the_time_left_of_uneven_steps_is_by_the_pace_of_all() -> None:
    """Every fifth step takes 100 s, the others 1 s."""
    even, uneven = RemainingTime(), RemainingTime(uneven=True)
    now, told = 0.0, []
    for done in range(101):
        now += 100.0 if done % 5 == 4 and done < 50 else 1.0
        even.observe(done, 200, now)
        told.append(uneven.observe(done, 200, now))
    assert told[-1] == 99 + 10 * 100 - 9 and even.observe(100, 200, now) == 100.0


def test_a_pace_is_measured_from_where_a_series_begins() -> None:
    out, clock = io.StringIO(), Clock()
    with SimulationProgress(out, clock) as progress:
        clock.now += 500.0
        progress.begin()
        clock.now += LOG_SECONDS
        progress.step(1, 3)
    assert out.getvalue() == f"simulated step 1 of 3, about {duration(2 * LOG_SECONDS)} left\n"


def test_a_run_says_how_long_its_steps_will_take() -> None:
    assert "step 5/20  about 1 min 15 s left  training" in plain_lines((30.0, replace(VIEW, left=75.0)))[-1]
    console = Console(file=io.StringIO(), width=200)
    console.print(panel(replace(VIEW, left=75.0), 30.0))
    assert "about 1 min 15 s left" in console.file.getvalue()  # type: ignore[attr-defined]
    shown, clock = io.StringIO(), Clock()
    progress = RunProgress("run", 20, PlainDisplay(shown, 0.0, clock), clock)
    for step in (1, 2):
        clock.now += 3.0
        progress.warm_up(step, 10, 0.5)
    assert "supervised warm-up 2/10, loss 0.500, about 24.0 s left" in shown.getvalue()
    for step in made_run.make_steps(2):
        progress.step(step, "", ())
    mean = fmean(step.step_seconds for step in made_run.make_steps(2))
    assert f"step 2/20  about {duration(18 * mean)} left" in shown.getvalue()


def test_a_terminal_gets_a_line_that_moves_and_goes() -> None:
    shown = moments(Terminal(), Clock(), 1.0, 2.0, 3.0)
    assert "requests that arrived have ended" in shown
    assert "requests" not in shown.splitlines()[-1]


def test_a_run_that_borrows_says_what_it_had() -> None:
    view = replace(VIEW, lending="had for 75 % of the time wanted; lent-1 is recalled (4 requests/s, lent up to 3)")
    *_, line = plain_lines((0.0, view))
    assert f"max 2  lent devices: {view.lending}  w0 train" in line
    shown = io.StringIO()
    Console(file=shown, width=120).print(panel(view, 1.0))
    assert f"\nlent devices  {view.lending}" in shown.getvalue()
    Console(file=shown, width=120).print(panel(VIEW, 1.0))
    assert shown.getvalue().count("lent devices") == 1


@pytest.mark.parametrize(
    ("loans", "words"),
    [
        ({}, ""),
        ({"lent-0": StepLoan(0.0, 0.0, 1, "")}, "not wanted"),
        ({"lent-0": StepLoan(2.0, 0.5, 1, ""), "lent-1": StepLoan(2.0, 1.5, 1, "")}, "had for 50 % of the time wanted"),
        (
            {f"lent-{n}": StepLoan(1.0, 1.0, 1, "x" * (n > 0)) for n in range(4)},
            "had for 100 % of the time wanted; 3 of 4 are recalled",
        ),
    ],
)
def test_loans_in_words(loans: dict[str, StepLoan], words: str) -> None:
    assert loan_words(loans) == words
