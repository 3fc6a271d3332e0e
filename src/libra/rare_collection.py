"""Garbage collection in a server that holds thousands of requests for long.

Invariant: there is a collection when there are `_GROWN` objects more than after the one before, and no other. Everybody
waits while it looks at every object of every request. Python's own would come with the turnover of the requests, though
nothing of it is garbage: connections that end are nearly all that refers to itself here.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_GROWN = 1_000_000  # objects, of the order of 200 MB
_LOOK_SECONDS = 1.0


@asynccontextmanager
async def collecting_rarely() -> AsyncIterator[None]:
    """While it lasts, only growth leads to a collection, and what was there before is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    task = asyncio.create_task(_collect())
    try:
        yield
    finally:
        task.cancel()
        gc.enable()
        gc.unfreeze()


async def _collect() -> None:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        grown, _, _ = gc.get_count()  # allocated less freed since the last collection, also where it is disabled
        if grown > _GROWN:
            gc.collect()
