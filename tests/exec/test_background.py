"""Tasks that nobody waits for: what breaks one is not forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

from libra.exec.background import background


async def test_what_breaks_a_task_goes_to_the_loop_and_its_end_does_not() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    async def break_down() -> None:
        raise ZeroDivisionError

    stopped, ended = background(asyncio.sleep(60)), background(asyncio.sleep(0))
    stopped.cancel()
    await asyncio.gather(stopped, ended, background(break_down()), return_exceptions=True)
    await asyncio.sleep(0)
    assert [type(context["exception"]) for context in told] == [ZeroDivisionError]
