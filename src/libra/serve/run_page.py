"""The page of a run in a browser: while the run goes on, and after its end.

Invariant: it is the page of `libra report`, made from the run's records in a process of its own, so the run notices
nothing. One page is made at a time, and a browser fetches it when there is a newer one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from aiohttp import web

from libra.records.run_lock import running_process
from libra.report.run_page import render_report
from libra.serve.answers import refused

_LOOK_SECONDS = 2.0  # between two looks at the records
_NICE = 10  # of the process that makes pages: the run comes first
_HTML = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
# The page replaces its own contents, so that the place where somebody reads stays.
_SCRIPT = """
<script>
let shown = "%d";
setInterval(async () => {
  const answer = await fetch("version").catch(() => null);
  const state = document.getElementById("live");
  if (!answer || !answer.ok) {
    const why = answer ? (await answer.json()).error.message : "libra report does not answer";
    state.textContent = "The page is as it was: " + why;
    return;
  }
  const newest = await answer.text();
  if (newest === shown) return;
  const page = new DOMParser().parseFromString(await (await fetch("./")).text(), "text/html");
  const open = [...document.querySelectorAll("details")].map((it) => it.open);
  document.querySelector("main").replaceWith(page.querySelector("main"));
  document.querySelectorAll("details").forEach((it, place) => { it.open = open[place] ?? it.open; });
  shown = newest;
}, 2000);
</script>
</body>"""


@dataclass(eq=False)
class RunPage:
    """The newest page of a run directory. `version` counts the pages that were made."""

    run: Path
    html: str = ""
    version: int = 0
    trouble: str = ""  # the records cannot be read now
    _seen: tuple[object, ...] = ()

    async def look(self, executor: Executor) -> None:
        """Make the page again where a record changed since the last one."""
        seen = (*_records(self.run), ("process", running_process(self.run) or 0, 0))
        if seen == self._seen:
            return
        self._seen = seen
        try:
            page = await asyncio.get_running_loop().run_in_executor(executor, render_report, self.run)
        except (ValueError, OSError) as error:  # a line that is being written, or a run that was removed
            self.trouble = str(error)
            return
        self.trouble, self.version = "", self.version + 1
        process = running_process(self.run)
        state = "The run has ended." if process is None else f"The run goes on (process {process})."
        page = page.replace("<main>", f'<main>\n<p id="live" class="note">{state}</p>', 1)
        self.html = page.replace("</body>", _SCRIPT % self.version, 1)

    async def follow(self, executor: Executor) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.look(executor)


def _records(run: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of each record."""
    found = []
    for path in sorted(run.glob("*.json*")):
        with suppress(OSError):
            state = path.stat()
            found.append((path.name, state.st_size, state.st_mtime_ns))
    return tuple(found)


@asynccontextmanager
async def run_page(run: Path) -> AsyncIterator[web.Application]:
    """An application with the page at `/` and its number at `/version`. Raises what `render_report` raises."""
    page = RunPage(run)
    with ProcessPoolExecutor(1, get_context("spawn"), os.nice, (_NICE,)) as executor:
        await page.look(executor)
        if page.trouble:
            raise ValueError(page.trouble)

        async def shown(_: web.Request) -> web.Response:
            return web.Response(text=page.html, headers=_HTML)

        async def version(_: web.Request) -> web.Response:
            if page.trouble:
                return refused(page.trouble, 503)
            return web.Response(text=str(page.version), headers={"Cache-Control": "no-store"})

        application = web.Application()
        application.router.add_get("/", shown)
        application.router.add_get("/version", version)
        following = asyncio.create_task(page.follow(executor))
        try:
            yield application
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
