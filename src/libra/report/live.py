"""Live display of a run or a simulation, in a terminal or a log file.

A display has no thread, so its number of calls and its refresh rate bound its cost. Times are seconds since the display
was created, at the start of the command. All lines and messages are shown. Between two refreshes, only the latest view
is shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

from libra.plan.transition import Role
from libra.records.schema import role_of
from libra.report.remaining import RemainingTime
from libra.report.words import cell, count, duration, plain, printable

if TYPE_CHECKING:  # a run needs no simulator
    from libra.sim.simulate import Elapsed

REFRESH_SECONDS = 0.25  # one refresh costs a few milliseconds: about 1 % of a core
PLAIN_SECONDS = 5.0  # between progress lines in a log file
FIRST_SECONDS = 1.0  # before a simulation shows progress: most have ended by then
LOG_SECONDS = 10.0  # between progress lines of a simulation in a log file

_COLOURS = {
    Role.TRAIN: "yellow",
    Role.ROLLOUT: "cyan",
    Role.JOINING: "bright_yellow",
    Role.DRAINING: "magenta",
    Role.IDLE: "bright_black",
    Role.FAILED: "red",
}


@dataclass(frozen=True, slots=True)
class RunView:
    """The state of a run at one moment, for a reader. None: not known yet."""

    name: str
    step: int
    steps: int
    reward: float | None = None  # mean over the last `reward_steps`
    reward_steps: int = 0
    tokens_per_second: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    workers: tuple[tuple[str, str, str], ...] = ()  # (id, role, detail)
    last_decision: str = ""  # empty: none yet
    phase: str = ""
    messages: tuple[str, ...] = ()  # the latest few
    left: float | None = None  # seconds that the remaining steps need
    lending: str = ""  # a step's use of the lent devices; empty: no device is lent


class Display(Protocol):
    """Interface of a live display of a run."""

    def show(self, view: RunView) -> None:
        """Show the present state of the run."""

    def line(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Show the last view and restore the terminal; later calls show nothing."""


def make_display(stream: TextIO) -> Display:
    """A live panel if `stream` is a terminal, otherwise plain lines."""
    return RichDisplay(stream) if stream.isatty() else PlainDisplay(stream)


class PlainDisplay:
    """Prints one line per step, and a progress line during a long step."""

    def __init__(
        self, stream: TextIO, every_seconds: float = PLAIN_SECONDS, clock: Callable[[], float] = monotonic
    ) -> None:
        self._stream = stream
        self._every = every_seconds
        self._clock, self._began = clock, clock()
        self._shown: RunView | None = None
        self._shown_at = 0.0
        self._latest: RunView | None = None
        self._messages: tuple[str, ...] = ()

    def show(self, view: RunView) -> None:
        for message in view.messages:
            if message not in self._messages:
                self.line(message)
        self._messages = view.messages
        self._latest = view
        shown = self._shown
        if shown is None or view.step != shown.step or self._clock() - self._shown_at >= self._every:
            self._write(view)

    def line(self, text: str) -> None:
        self._latest = None  # a view that is older than this line must not follow it
        write_line(self._stream, f"{duration(self._clock() - self._began)}  {text}")

    def close(self) -> None:
        if self._latest is not None:
            self._write(self._latest)

    def _write(self, view: RunView) -> None:
        self._shown, self._shown_at = view, self._clock()
        self.line(summary_line(view))


class RichDisplay:
    """A panel at the bottom of the terminal, with lines scrolling above it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._live = Live(console=Console(file=stream), auto_refresh=False, transient=False)
        self._live.start()
        self._shown_at = float("-inf")
        self._latest: RunView | None = None

    def show(self, view: RunView) -> None:
        self._latest = view
        if self._clock() - self._shown_at >= REFRESH_SECONDS:
            self._refresh(view)

    def line(self, text: str) -> None:
        self._live.console.print(Text(f"{duration(self._clock() - self._began)}  {text}"))

    def close(self) -> None:
        if self._latest is not None:
            self._refresh(self._latest)
            self._latest = None
        self._live.stop()

    def _refresh(self, view: RunView) -> None:
        self._shown_at = self._clock()
        self._live.update(panel(view, self._shown_at - self._began), refresh=True)


def write_line(stream: TextIO, text: str) -> None:
    """Write a line at once. If the reader has closed the stream, like `| head`, later lines are dropped, and the run
    continues.
    """
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except BrokenPipeError:
        # Python flushes the rest at exit, which would fail.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def summary_line(view: RunView) -> str:
    """The view in one line without colours.

    >>> summary_line(RunView("demo", 3, 20, 0.41, 3, 4200.0, 0.5, 1, (("w0", "train", ""),), "", "training"))
    'step 3/20  training  reward 0.41 (mean of 3 steps)  4,200 tokens/s  staleness 0.5, max 1  w0 train'
    """
    lending = f"lent devices: {view.lending}" if view.lending else ""
    parts = [f"step {view.step}/{view.steps}", left_words(view.left), view.phase, *_measures(view), lending]
    workers = ", ".join(f"{worker} {role}" for worker, role, _ in view.workers)
    return "  ".join(part for part in (*parts, workers) if part)


def panel(view: RunView, elapsed: float) -> RenderableType:
    """The view as a block of lines: progress, measures, workers, last decision, messages."""
    head = Text.assemble(
        (view.name, "bold"),
        f"  step {view.step}/{view.steps} ",
        *_bar(view.step, view.steps),
        f"  {duration(elapsed)}  ",
        *((f"{left_words(view.left)}  ",) if view.left is not None else ()),
        (view.phase, "italic"),
    )
    workers = Table.grid(padding=(0, 2))
    for worker, role, detail in view.workers:
        workers.add_row(Text(worker), Text(role, style=_COLOURS[role_of(role)]), Text(detail, style="dim"))
    blocks: list[RenderableType] = [head, Text("   ".join(_measures(view)))]
    if view.workers:
        blocks.append(workers)
    if view.lending:
        blocks.append(Text.assemble(("lent devices  ", "bold"), view.lending))
    if view.last_decision:
        blocks.append(Text.assemble(("last decision  ", "bold"), view.last_decision))
    blocks += [Text(message, style="dim") for message in view.messages]
    return Group(*blocks)


def left_words(seconds: float | None) -> str:
    """
    >>> left_words(75.0), left_words(None)
    ('about 1 min 15 s left', '')
    """
    return "" if seconds is None else f"about {duration(seconds)} left"


def _measures(view: RunView) -> list[str]:
    measures = []
    if view.reward is not None:
        over = f" (mean of {view.reward_steps} steps)" if view.reward_steps > 1 else ""
        measures.append(f"reward {plain(view.reward)}{over}")
    if view.tokens_per_second is not None:
        measures.append(f"{count(view.tokens_per_second)} tokens/s")
    if view.staleness_mean is not None:
        most = "" if view.staleness_max is None else f", max {view.staleness_max}"
        measures.append(f"staleness {plain(view.staleness_mean)}{most}")
    return measures


def _bar(step: int, steps: int, width: int = 24) -> tuple[tuple[str, str], tuple[str, str]]:
    done = 0 if steps == 0 else min(width, width * step // steps)
    return ("━" * done, "green"), ("━" * (width - done), "bright_black")


class SimulationProgress:
    """Shows the progress of a simulation from `Elapsed` values: one updated line on a terminal, otherwise a line every
    ten seconds.

    `requests` is the number of all requests, if known; `clock` gives seconds. As a context manager, it restores the
    terminal at the end.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = monotonic, *, requests: int | None = None) -> None:
        live = stream.isatty()
        self._stream, self._requests = stream, requests
        self._status = Status("", console=Console(file=stream)) if live else None
        self._pace = REFRESH_SECONDS if live else LOG_SECONDS
        self._clock = clock
        self._due = clock() + (FIRST_SECONDS if live else LOG_SECONDS)
        self.begin()

    def begin(self, *, estimated: bool = False, uneven: bool = False) -> None:
        """Start to measure the pace of steps. The arguments are those of `RemainingTime`."""
        self._remaining = RemainingTime(estimated=estimated, uneven=uneven)
        self._remaining.observe(0, 0, self._clock())

    def __call__(self, moment: Elapsed) -> None:
        now = self._clock()
        if now < self._due:
            return  # the pace is measured between the moments that are shown
        ended = f"{count(moment.ended)} of {count(moment.arrived)} requests that arrived have ended"
        if self._requests is not None:
            left = self.left(moment.ended, self._requests)
            ended = f"{count(moment.ended)} of {count(self._requests)} requests have ended{left}"
        self.tell(f"simulated {duration(moment.seconds)}: {ended}")

    def step(self, done: int, steps: int) -> None:
        """Show that a simulation of `steps` steps has made `done` of them."""
        self.tell(f"simulated step {done} of {steps}{self.left(done, steps)}")

    def left(self, done: int, total: int) -> str:
        """Text for the remaining time, such as `, about 20 s left`; empty while unknown, and at the end."""
        left = left_words(self._remaining.observe(done, total, self._clock()))
        return f", {left}" if left and done < total else ""

    def tell(self, words: str) -> None:
        """Show the text, unless another text was shown very recently."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + self._pace
        if self._status is None:
            write_line(self._stream, printable(words))
        else:
            self._status.update(cell(words))
            self._status.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
