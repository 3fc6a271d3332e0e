"""Garbage collection in a server that holds thousands of requests for long.

Invariant: there is a collection when `_CONNECTIONS` were made since the one before and the process has grown by what so
many leave, and no other. Everybody waits while it looks at every object of every request. Python's own would come with
the turnover of the requests, one by growth alone with how many of them wait, though nothing of either is garbage: of
what these servers make only the transport of a connection refers to itself, and of those only ones that have ended,
before Python 3.12.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

_CONNECTIONS = 100_000
_LEFT = 5  # objects that one leaves, or more, of 1 kB together
_LOOK_SECONDS = 1.0


@dataclass(slots=True)
class Connections:
    """Of a process, to its clients and to others."""

    made: int = 0  # since the last collection


@asynccontextmanager
async def collecting_rarely(connections: Connections) -> AsyncIterator[None]:
    """While it lasts, only connections lead to a collection, and what was there before is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    task = asyncio.create_task(_collect(connections))
    try:
        yield
    finally:
        task.cancel()
        gc.enable()
        gc.unfreeze()


async def _collect(connections: Connections) -> None:
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        grown, _, _ = gc.get_count()  # allocated less freed since the last collection, also where it is disabled
        if connections.made >= _CONNECTIONS and grown >= _LEFT * _CONNECTIONS:
            gc.collect()
            connections.made = 0
