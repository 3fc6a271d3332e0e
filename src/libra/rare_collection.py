"""Garbage collection in a server that holds thousands of requests for long.

Invariant: what only refers to itself is found within minutes, not seconds. A full collection looks at every object of
every request that waits, and everybody waits for it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_SECONDS = 600.0  # between full collections
_YOUNG, _OLDER, _NEVER = 20_000, 10, 1_000_000  # thresholds of Python's three generations


@asynccontextmanager
async def collecting_rarely() -> AsyncIterator[None]:
    """While it lasts, full collections come every ten minutes, and what was there before is not looked at again."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _OLDER, _NEVER)
    task = asyncio.create_task(_collect())
    try:
        yield
    finally:
        task.cancel()
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect() -> None:
    while True:
        await asyncio.sleep(_SECONDS)
        gc.collect()
