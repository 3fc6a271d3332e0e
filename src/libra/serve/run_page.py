"""The page of a run in a browser, during the run and after its end.

Invariant: the page is that of `libra report`, made from the run's records, so it does not affect the run. Only one page
is made at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from libra.records.run_lock import running_process
from libra.report.run_page import render_report
from libra.serve.live_page import alive, live_application, page_maker

_LOOK_SECONDS = 2.0  # between two checks of the records


@dataclass(eq=False)
class RunPage:
    """The newest page of a run directory. `version` counts the pages made."""

    run: Path
    html: str = ""
    version: int = 0
    trouble: str = ""  # why the records cannot be read now
    _seen: tuple[object, ...] = ()

    async def look(self, executor: Executor) -> None:
        """Make the page again if a record has changed since the last page."""
        seen = (*_records(self.run), ("process", running_process(self.run) or 0, 0))
        if seen == self._seen:
            return
        self._seen = seen
        try:
            page = await asyncio.get_running_loop().run_in_executor(executor, render_report, self.run)
        except (ValueError, OSError) as error:  # a line is incomplete now, or the run was removed
            self.trouble = str(error)
            return
        self.trouble, self.version = "", self.version + 1
        process = running_process(self.run)
        state = "The run has ended." if process is None else f"The run is still running (process {process})."
        self.html = alive(page, state, self.version)

    async def newest(self) -> str:
        return self.html

    async def follow(self, executor: Executor) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.look(executor)


def _records(run: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and modification time of each record."""
    found = []
    for path in sorted(run.glob("*.json*")):
        with suppress(OSError):
            state = path.stat()
            found.append((path.name, state.st_size, state.st_mtime_ns))
    return tuple(found)


@asynccontextmanager
async def run_page(run: Path) -> AsyncIterator[web.Application]:
    """An application with the page at `/` and its version at `/version`. Raises the errors of `render_report`."""
    page = RunPage(run)
    with page_maker() as executor:
        await page.look(executor)
        if page.trouble:
            raise ValueError(page.trouble)
        following = asyncio.create_task(page.follow(executor))
        try:
            yield live_application(page)
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
