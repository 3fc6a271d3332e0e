"""A page in a browser renews itself: it takes the newer page's contents, and keeps what somebody has opened."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from libra.serve.http import serving
from libra.serve.live_page import alive, live_application

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPENED = '<script>document.querySelector("details").open = true;</script></body>'


class Changing:
    """A page that is another one each time that it is fetched."""

    def __init__(self, trouble: str = "") -> None:
        self.fetched, self.trouble = 0, trouble

    @property
    def version(self) -> int:
        return min(self.fetched + 1, 2)

    async def newest(self) -> str:
        version, self.fetched = self.version, self.fetched + 1
        html = f"<body><main><p>page {version}</p><details><summary>more</summary></details></main></body>"
        return alive(html, f"state {version}", version).replace("</body>", _OPENED)


async def dom(page: Changing, profile: Path) -> str:
    """The document of a browser that has shown the page for some seconds."""
    assert BROWSER is not None
    async with serving(live_application(page), "127.0.0.1", 0) as base:
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += ["--virtual-time-budget=9000", "--dump-dom", f"{base}/"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=50, check=True)
        return re.sub(r"<script>.*?</script>", "", done.stdout, flags=re.DOTALL)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
async def test_a_newer_page_replaces_the_contents_only(tmp_path: Path) -> None:
    page = Changing()
    shown = await dom(page, tmp_path)
    assert "page 2" in shown and "page 1" not in shown and "state 2" in shown
    assert '<details open="">' in shown and page.fetched == 2  # no third one, as there is no newer version


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
async def test_a_page_that_cannot_be_renewed_stays_and_says_why(tmp_path: Path) -> None:
    shown = await dom(Changing("a record is damaged"), tmp_path)
    assert "page 1" in shown and "This page is not up to date: a record is damaged" in shown
