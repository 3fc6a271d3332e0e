"""The boundary between two steps: whoever holds it, nobody else makes a step or changes who makes them.

Invariant: that it was held counts as waiting only while a step was due; otherwise it costs nobody anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Boundary(asyncio.Lock):
    def __init__(self) -> None:
        super().__init__()
        self._due: float | None = None  # since when a step waits for it

    @asynccontextmanager
    async def step(self) -> AsyncIterator[float]:
        """Hold it to make a step; gives the seconds that the step waited for it."""
        asked = self._due = time.monotonic()
        try:
            await self.acquire()
        finally:
            self._due = None
        try:
            yield time.monotonic() - asked
        finally:
            self.release()

    def waited(self, since: float) -> float:
        """Seconds after this moment for which a step waits by now."""
        return 0.0 if self._due is None else time.monotonic() - max(since, self._due)
