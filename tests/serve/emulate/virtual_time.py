"""An event loop whose time passes only when there is nothing to do, and then at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from heapq import heappop
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0

    def time(self) -> float:
        return self._virtual

    def _run_once(self) -> None:
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            handle = heappop(scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self._virtual = max(self._virtual, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run(main: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
