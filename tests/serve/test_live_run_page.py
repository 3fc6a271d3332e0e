"""The page of a run that goes on: renewed as records come, and kept when the run has ended."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiohttp import ClientSession
from fakes.made_run import write_run

from libra.serve.run_page import RunPage


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = write_run(tmp_path / "run-7").directory
    (directory / "summary.json").unlink()
    return directory


def cut(run: Path, lines: int) -> bytes:
    """Leave the first steps only; returns the rest."""
    metrics = run / "metrics.jsonl"
    whole = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(whole[:lines]))
    return b"".join(whole[lines:])


async def test_a_page_is_made_again_where_records_came(run: Path) -> None:
    rest = cut(run, 40)
    page = RunPage(run)
    with ThreadPoolExecutor(1) as executor:
        await page.look(executor)
        first = page.html
        assert page.version == 1 and "The run has ended." in first
        await page.look(executor)
        assert page.version == 1
        with open(run / "metrics.jsonl", "ab") as metrics:
            metrics.write(rest)
        await page.look(executor)
    assert page.version == 2 and page.html != first
    assert 'let shown = "2"' in page.html


async def test_records_that_cannot_be_read_leave_the_last_page(run: Path) -> None:
    page = RunPage(run)
    with ThreadPoolExecutor(1) as executor:
        await page.look(executor)
        kept = page.html
        (run / "periods.jsonl").write_text("{}\n")
        await page.look(executor)
    assert page.html == kept and "periods.jsonl" in page.trouble


def test_the_command_serves_until_it_is_ended(run: Path) -> None:
    asyncio.run(_served(run))


def test_a_browser_is_asked_for_the_token(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("secret\n")
    asyncio.run(_served(run, "--token-file", str(file), password="secret"))


async def _served(run: Path, *options: str, password: str | None = None) -> None:
    command = [sys.executable, "-m", "libra.cli.app", "report", str(run), "--page", "0", *options]
    headers = (
        {} if password is None else {"Authorization": f"Basic {b64encode(f'anyone:{password}'.encode()).decode()}"}
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        found = re.fullmatch(r"page: (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)\n", line)
        assert found is not None, line
        async with ClientSession(found[1]) as stranger, stranger.get("/", headers={"Accept": "text/html"}) as answer:
            assert answer.status == (200 if password is None else 401)
            assert answer.headers.get("WWW-Authenticate", "Basic").startswith("Basic")
        async with ClientSession(found[1], headers=headers) as session:
            async with session.get("/") as answer:
                text = await answer.text()
                assert answer.status == 200 and "<svg" in text and 'id="live"' in text
            async with session.get("/version") as answer:
                assert await answer.text() == "1"
            async with session.get("/", headers={"Host": "evil.example"}) as answer:
                assert answer.status == 403
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 30) == 0
    assert not (run / "report.html").exists()


def test_a_token_without_a_page_is_refused(run: Path) -> None:
    command = [sys.executable, "-m", "libra.cli.app", "report", str(run), "--token-file", "token"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "--token-file protects the page" in done.stderr


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "libra.cli.app", "report", str(tmp_path), "--page", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("libra: ") and "not the directory of a run" in done.stderr
