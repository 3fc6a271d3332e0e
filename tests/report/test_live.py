from __future__ import annotations

import io
from dataclasses import replace

import pytest

from libra.report.live import PlainDisplay, RichDisplay, RunView, make_display

VIEW = RunView(
    name="calculator",
    step=5,
    steps=20,
    elapsed=30.0,
    reward=0.41,
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


def plain_lines(*views: RunView) -> list[str]:
    out = io.StringIO()
    display = PlainDisplay(out)
    for view in views:
        display.show(view)
    return out.getvalue().splitlines()


def test_the_stream_chooses_the_display() -> None:
    assert isinstance(make_display(io.StringIO()), PlainDisplay)
    terminal = make_display(Terminal())
    assert isinstance(terminal, RichDisplay)
    terminal.close()


def test_a_plain_line_holds_the_view_and_no_ansi() -> None:
    lines = plain_lines(VIEW)
    assert lines == [
        "weights [red]v5[/red]",
        "30.0 s  step 5/20  training  reward 0.41  4,236 tokens/s  staleness 0.6, max 2  w0 train, w1 rollout:long",
    ]


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
    views = [replace(VIEW, step=step, elapsed=elapsed, messages=()) for step, elapsed in moments]
    assert len(plain_lines(*views)) == shown


def test_a_plain_display_repeats_no_message_and_loses_none() -> None:
    views = [
        replace(VIEW, elapsed=30.0 + i / 10, messages=window)
        for i, window in enumerate([("a",), ("a", "b"), ("b", "c")])
    ]
    assert [line for line in plain_lines(*views) if len(line) == 1] == ["a", "b", "c"]


def test_closing_shows_the_last_view() -> None:
    out = io.StringIO()
    display = PlainDisplay(out)
    display.show(VIEW)
    display.show(replace(VIEW, elapsed=31.0, phase="saving"))
    assert "saving" not in out.getvalue()
    display.close()
    assert "saving" in out.getvalue()


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
    out = Terminal()
    display = RichDisplay(out)
    for tick in range(100):
        display.show(replace(VIEW, elapsed=tick / 100, phase=f"tick-{tick}."))
    shown = out.getvalue()
    assert [tick for tick in range(100) if f"tick-{tick}." in shown] == [0, 25, 50, 75]
    display.show(replace(VIEW, elapsed=0.1, phase="resumed"))  # a clock that starts again does not freeze the display
    assert "resumed" in out.getvalue()
    display.show(replace(VIEW, elapsed=0.2, phase="the end"))
    display.close()
    assert "the end" in out.getvalue()


def test_a_view_of_a_run_that_has_not_begun() -> None:
    view = RunView("r", 0, 0, 0.0, None, None, None, None, (), "", "warm-up 40/120 loss 0.31")
    assert plain_lines(view) == ["0.00 s  step 0/0  warm-up 40/120 loss 0.31"]
    out = Terminal()
    display = RichDisplay(out)
    display.show(view)
    display.close()
    assert "warm-up 40/120 loss 0.31" in out.getvalue()
