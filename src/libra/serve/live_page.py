"""A web page that updates itself: the common part of the pages of a run and of a router.

Invariant: a separate process with low priority renders the page. A browser fetches the page when its version changes,
and keeps its scroll position.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import Executor, ProcessPoolExecutor
from html import escape
from multiprocessing import get_context
from typing import Protocol

from aiohttp import web

from libra.serve.answers import refused

_NICE = 10  # of the process that renders pages
_UNKEPT = {"Cache-Control": "no-store"}
_HTML = {"Content-Type": "text/html; charset=utf-8", **_UNKEPT}
# The page replaces its own contents, so that the reader's scroll position stays.
_SCRIPT = """
<script>
let shown = "%d";
const at = (path) => location.origin + location.pathname + path;
setInterval(async () => {
  const answer = await fetch(at("version")).catch(() => null);
  const state = document.getElementById("live");
  if (!answer || !answer.ok) {
    const why = answer ? (await answer.json()).error.message : "the command that serves it does not answer";
    state.textContent = "This page is not up to date: " + why;
    return;
  }
  const newest = await answer.text();
  if (newest === shown) return;
  const page = new DOMParser().parseFromString(await (await fetch(at(""))).text(), "text/html");
  const open = [...document.querySelectorAll("details")].map((it) => it.open);
  document.querySelector("main").replaceWith(page.querySelector("main"));
  document.querySelectorAll("details").forEach((it, place) => { it.open = open[place] ?? it.open; });
  shown = newest;
}, 2000);
</script>
</body>"""


class LivePage(Protocol):
    """A page that changes."""

    @property
    def version(self) -> int:
        """A number that grows with each change of the page."""

    @property
    def trouble(self) -> str:
        """Why no newer page can be made now; empty if it can."""

    async def newest(self) -> str:
        """The newest page, as HTML."""


def alive(html: str, state: str, version: int) -> str:
    """`html` with a line about its state, and the script that updates the page."""
    html = html.replace("<main>", f'<main>\n<p id="live" class="note">{escape(state)}</p>', 1)
    return html.replace("</body>", _SCRIPT % version, 1)


def live_application(page: LivePage) -> web.Application:
    """An application with the page at `/` and its version at `/version`."""

    async def shown(_: web.Request) -> web.Response:
        return web.Response(text=await page.newest(), headers=_HTML)

    async def version(_: web.Request) -> web.Response:
        if page.trouble:
            return refused(page.trouble, 503)
        return web.Response(text=str(page.version), headers=_UNKEPT)

    application = web.Application()
    application.router.add_get("/", shown)
    application.router.add_get("/version", version)
    return application


def page_maker() -> Executor:
    """An executor with one process that renders pages; the process starts with the first page."""
    return ProcessPoolExecutor(1, get_context("spawn"), _come_last)


def _come_last() -> None:
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that serves the page
