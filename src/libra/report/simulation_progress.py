"""How far a simulation is, for those who wait for it.

Invariant: a simulation that is over in no time leaves no trace; what is shown goes to the given stream and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.status import Status

from libra.report.words import count, duration
from libra.sim.simulate import Elapsed

FIRST_SECONDS = 1.0  # of waiting before anything is shown
TERMINAL_SECONDS = 0.25
PLAIN_SECONDS = 10.0  # a log file wants a sign of life, not a film


class _Display(Protocol):
    def show(self, text: str) -> None: ...

    def close(self) -> None: ...


class SimulationProgress:
    """Told a `Elapsed` now and then, it shows one: a moving line on a terminal, a line each ten seconds elsewhere.

    `clock` gives seconds. A context manager: at its end the terminal is as it was.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = monotonic) -> None:
        live = stream.isatty()
        self._display: _Display = _Live(stream) if live else _Lines(stream)
        self._pace = TERMINAL_SECONDS if live else PLAIN_SECONDS
        self._clock = clock
        self._due = clock() + (FIRST_SECONDS if live else PLAIN_SECONDS)

    def __call__(self, moment: Elapsed) -> None:
        now = self._clock()
        if now >= self._due:
            self._due = now + self._pace
            self._display.show(words(moment))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()


def words(moment: Elapsed) -> str:
    """
    >>> words(Elapsed(seconds=61.2, arrived=1500, ended=1400))
    'simulated 1 min 01 s: 1,400 of 1,500 requests that came have ended'
    """
    return (
        f"simulated {duration(moment.seconds)}: {count(moment.ended)} of {count(moment.arrived)} requests that came"
        " have ended"
    )


class _Live:
    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._status: Status | None = None

    def show(self, text: str) -> None:
        if self._status is None:
            self._status = Status(text, console=self._console)
            self._status.start()
        else:
            self._status.update(text)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        pass
