"""Progress of a run of cells, shown while it runs.

Invariant: a line for each finished cell, on a terminal or not; only a terminal gets a bar below them, which is gone at
the end.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Counts cells to `total`. A context manager. Where it is not `shown` it says nothing."""

    def __init__(self, total: int, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, soft_wrap=True, quiet=not shown)
        self._total, self._done = total, 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        live = shown and self._console.is_terminal
        self._bar = Bar(*columns, console=self._console, transient=True, disable=not live)
        self._task = self._bar.add_task("", total=total)

    def finished(self, name: str, cpu_seconds: float, found: bool) -> None:
        self._done += 1
        how = "kept from before" if found else "computed"
        counted = f"{self._done:{len(str(self._total))}}/{self._total}"
        self._console.print(f"{counted}  {cpu_seconds:8.2f} s CPU  {how:<16}  {escape(name)}", highlight=False)
        self._bar.update(self._task, completed=self._done)

    def running(self, names: list[str]) -> None:
        self._bar.update(self._task, description=escape(", ".join(names)))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
