"""Background tasks whose errors are not lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def background(work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
    """Start a task that no caller awaits. Its exception goes to the loop's exception handler. The caller must keep a
    reference to the task.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_raise_in_loop)
    return task


def _raise_in_loop(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
