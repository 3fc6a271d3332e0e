"""A run as it happens, in a terminal or a log file.

Invariant: a display only shows; it keeps no thread and reads no clock, so what it costs is bounded by how often it is
asked and by the pace of `RunView.elapsed`. Every line and message reaches the reader, whatever the pace; of the views
between two refreshes only the latest is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from libra.records.roles import Role, role_of
from libra.report.words import count, duration, plain

REFRESH_SECONDS = 0.25  # one refresh costs a few milliseconds: about 1 % of a core
PLAIN_SECONDS = 5.0  # a log file wants a sign of life, not a film

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
    """What a person watching a run wants to know, at one moment. None: not known yet."""

    name: str
    step: int
    steps: int
    elapsed: float  # seconds since the run began
    reward: float | None  # mean over the last steps
    tokens_per_second: float | None
    staleness_mean: float | None
    staleness_max: int | None
    workers: tuple[tuple[str, str, str], ...]  # (id, role, detail)
    last_decision: str  # empty: none yet
    phase: str
    messages: tuple[str, ...] = ()  # the latest few


class Display(Protocol):
    """Where a run is shown."""

    def show(self, view: RunView) -> None:
        """The run is now like this."""

    def line(self, text: str) -> None:
        """Something to be read once, and to stay."""

    def close(self) -> None:
        """Show the last view and leave the terminal as it was; nothing is shown afterwards."""


def make_display(stream: TextIO) -> Display:
    """A live panel where `stream` is a terminal, plain lines where it is not."""
    return RichDisplay(stream) if stream.isatty() else PlainDisplay(stream)


class PlainDisplay:
    """One line for each step, and a sign of life when a step takes long."""

    def __init__(self, stream: TextIO, every_seconds: float = PLAIN_SECONDS) -> None:
        self._stream = stream
        self._every = every_seconds
        self._shown: RunView | None = None
        self._latest: RunView | None = None
        self._messages: tuple[str, ...] = ()

    def show(self, view: RunView) -> None:
        for message in view.messages:
            if message not in self._messages:
                self.line(message)
        self._messages = view.messages
        self._latest = view
        shown = self._shown
        if shown is None or view.step != shown.step or view.elapsed - shown.elapsed >= self._every:
            self._write(view)

    def line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._latest is not None and self._latest is not self._shown:
            self._write(self._latest)

    def _write(self, view: RunView) -> None:
        self._shown = view
        self.line(summary_line(view))


class RichDisplay:
    """A panel at the bottom of the terminal, with lines scrolling above it."""

    def __init__(self, stream: TextIO) -> None:
        self._live = Live(console=Console(file=stream), auto_refresh=False, transient=False)
        self._live.start()
        self._shown_at = float("-inf")
        self._latest: RunView | None = None

    def show(self, view: RunView) -> None:
        self._latest = view
        # A resumed run may start its clock again: time that goes back is a reason to refresh, not to wait.
        if not 0 <= view.elapsed - self._shown_at < REFRESH_SECONDS:
            self._refresh(view)

    def line(self, text: str) -> None:
        self._live.console.print(Text(text))

    def close(self) -> None:
        if self._latest is not None:
            self._refresh(self._latest)
            self._latest = None
        self._live.stop()

    def _refresh(self, view: RunView) -> None:
        self._shown_at = view.elapsed
        self._live.update(panel(view), refresh=True)


def summary_line(view: RunView) -> str:
    """The view in one line without colours.

    >>> summary_line(RunView("demo", 3, 20, 12.0, 0.41, 4200.0, 0.5, 1, (("w0", "train", ""),), "", "training"))
    '12.0 s  step 3/20  training  reward 0.41  4,200 tokens/s  staleness 0.5, max 1  w0 train'
    """
    parts = [duration(view.elapsed), f"step {view.step}/{view.steps}", view.phase, *_measures(view)]
    workers = ", ".join(f"{worker} {role}" for worker, role, _ in view.workers)
    return "  ".join(part for part in (*parts, workers) if part)


def panel(view: RunView) -> RenderableType:
    """The view as a block of lines: progress, measures, workers, last decision, messages."""
    head = Text.assemble(
        (view.name, "bold"),
        f"  step {view.step}/{view.steps} ",
        *_bar(view.step, view.steps),
        f"  {duration(view.elapsed)}  ",
        (view.phase, "italic"),
    )
    workers = Table.grid(padding=(0, 2))
    for worker, role, detail in view.workers:
        workers.add_row(Text(worker), Text(role, style=_COLOURS[role_of(role)]), Text(detail, style="dim"))
    blocks: list[RenderableType] = [head, Text("   ".join(_measures(view)))]
    if view.workers:
        blocks.append(workers)
    if view.last_decision:
        blocks.append(Text.assemble(("last decision  ", "bold"), view.last_decision))
    blocks += [Text(message, style="dim") for message in view.messages]
    return Group(*blocks)


def _measures(view: RunView) -> list[str]:
    measures = []
    if view.reward is not None:
        measures.append(f"reward {plain(view.reward)}")
    if view.tokens_per_second is not None:
        measures.append(f"{count(view.tokens_per_second)} tokens/s")
    if view.staleness_mean is not None:
        most = "" if view.staleness_max is None else f", max {view.staleness_max}"
        measures.append(f"staleness {plain(view.staleness_mean)}{most}")
    return measures


def _bar(step: int, steps: int, width: int = 24) -> tuple[tuple[str, str], tuple[str, str]]:
    done = 0 if steps == 0 else min(width, width * step // steps)
    return ("━" * done, "green"), ("━" * (width - done), "bright_black")
