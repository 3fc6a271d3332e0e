"""How much memory a run takes.

Invariant: a page that several processes share counts once (proportional set size), so the sum is what the machine
really gives.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

_SECONDS = 20.0  # between two looks; one costs tens of milliseconds of CPU time for each large process


class MemoryWatch:
    """Watches this process, and those under `roots`, while it is entered."""

    def __init__(self, roots: Callable[[], Sequence[int]]) -> None:
        self._roots = roots
        self._task: asyncio.Task[None] | None = None
        self.peak_bytes = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def look(self) -> None:
        """Take the memory of this moment into account."""
        self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(self._proportional_set_size))

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_SECONDS)

    def _proportional_set_size(self) -> int:
        processes = [psutil.Process(os.getpid())]
        for pid in self._roots():
            with suppress(psutil.Error):
                root = psutil.Process(pid)
                processes += [root, *root.children(recursive=True)]
        total = 0
        for process in processes:
            with suppress(psutil.Error):  # it ended while we looked
                total += process.memory_full_info().pss
        return total
