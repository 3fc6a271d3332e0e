"""Tasks that nobody waits for."""

from __future__ import annotations

import asyncio


def raise_in_loop(task: asyncio.Task[None]) -> None:
    """As the callback of a task that is done: what broke it must not be forgotten, and goes to the loop's exception
    handler."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
