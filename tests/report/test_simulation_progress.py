"""What is shown of a simulation that takes its time."""

from __future__ import annotations

import doctest
from io import StringIO

from libra.report import simulation_progress
from libra.report.simulation_progress import FIRST_SECONDS, PLAIN_SECONDS, SimulationProgress
from libra.sim.simulate import Elapsed


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def moments(stream: StringIO, clock: Clock, *after: float) -> str:
    """What is shown of moments so many seconds after the start."""
    begun = clock.now
    with SimulationProgress(stream, clock) as progress:
        for number, seconds in enumerate(after):
            clock.now = begun + seconds
            progress(Elapsed(float(number), 10 * number, 9 * number))
    return stream.getvalue()


def test_a_short_simulation_leaves_no_trace() -> None:
    assert moments(StringIO(), Clock(), 0.0, 0.5 * PLAIN_SECONDS) == ""
    assert moments(Terminal(), Clock(), 0.0, 0.5 * FIRST_SECONDS) == ""


def test_a_log_file_gets_a_line_now_and_then() -> None:
    shown = moments(StringIO(), Clock(), 1.0, PLAIN_SECONDS, PLAIN_SECONDS + 1, 2 * PLAIN_SECONDS)
    assert shown.splitlines() == [
        "simulated 1.00 s: 9 of 10 requests that came have ended",
        "simulated 3.00 s: 27 of 30 requests that came have ended",
    ]


def test_a_terminal_gets_a_line_that_moves_and_goes() -> None:
    shown = moments(Terminal(), Clock(), 1.0, 2.0, 3.0)
    assert "requests that came have ended" in shown
    assert "requests" not in shown.splitlines()[-1]


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(simulation_progress)
    assert result.attempted > 0
    assert result.failed == 0
