"""The live page of a gateway: values while traffic passes, access, and what a browser makes of it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession
from serve.stage import Stage, staged

from libra.serve.gateway.engine_gauges import EngineGauges, read_gauges
from libra.serve.gateway.page import RouterPage, router_page_at
from libra.serve.gateway.recent import DECISIONS, Recent

VLLM = b"""# HELP vllm:num_requests_running Requests.
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting_by_reason{engine="0"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 7.5e-1
"""
SGLANG = b"sglang:num_running_reqs 4\nsglang:num_queue_reqs 0\nsglang:token_usage 0.5\n"


def test_gauges_of_ranks_add_up() -> None:
    assert read_gauges(VLLM) == EngineGauges(5, 1, 0.75)
    assert read_gauges(SGLANG) == EngineGauges(4, 0, 0.5)
    assert read_gauges(b"vllm:num_requests_running nothing\n") == EngineGauges()


async def _traffic(stage: Stage, trajectories: int = 3) -> None:
    for number in range(trajectories):
        for tool in (None, {"name": "look", "status": "ok"}):
            own = {"trajectory": f"t{number}", "task": "search"} | ({} if tool is None else {"tool": tool})
            status, _ = await stage.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 4, "libra": own})
            assert status == 200
    await stage.post("/trajectories/t0/finish", {"reward": 1.0})


@asynccontextmanager
async def paged(recent: Recent) -> AsyncIterator[tuple[Stage, RouterPage]]:
    async with staged(watchers=[recent], buckets=(64, 512)) as stage:
        with ThreadPoolExecutor(1) as maker:
            yield stage, RouterPage(stage.gateway, recent, "least-loaded", maker)


async def test_a_view_is_what_has_passed() -> None:
    recent = Recent()
    async with paged(recent) as (stage, page):
        await _traffic(stage)
        await page.look()
        view = page.view()
    assert (view.turns, view.limits, sorted(it.id for it in view.engines)) == (6, (64, 512), ["e0", "e1"])
    assert sum(it.generated_tokens for it in view.engines) == view.generated_tokens == 24
    assert [it.id for it in view.sessions] == ["t2", "t1"] and len(view.contexts) == 2
    assert [turn.tool for turn in view.sessions[0].turns] == ["look", None]
    assert [it.session for it in view.decisions] == ["t2", "t2", "t1", "t1", "t0", "t0"]
    assert {it.reason for it in view.decisions} <= {"least loaded", "holds the prefix"} and view.waiting == 0
    (ended,) = view.ended
    assert ended.finished and ended.peak_context > 8


async def test_queue_and_memory_are_the_engines_own_while_somebody_looks() -> None:
    recent = Recent()
    async with paged(recent) as (_, page):
        await page.look()
        assert {it.kv_share for it in page.view().engines} == {None}
        assert page.version == 1  # which a browser asks for
        await page.look()
        assert {(it.running, it.waiting, it.kv_share) for it in page.view().engines} == {(0, 0, 0.0)}


async def test_the_page_is_made_again_only_where_something_has_changed() -> None:
    recent = Recent()
    async with paged(recent) as (stage, page):
        first = await page.newest()
        version = page.version
        await page.look()
        await page.look()
        settled = page.version
        assert settled <= version + 1  # engines have told their gauges
        newest = await page.newest()
        assert await page.newest() is newest
        await _traffic(stage)
        await page.look()
        assert page.version == settled + 1
        assert "t2" in await page.newest() and "t2" not in first


async def test_turns_that_wait_are_counted() -> None:
    recent = Recent()
    async with paged(recent) as (stage, page):
        for name in ("e0", "e1"):
            stage.mark(name, healthy=False)
        turn = asyncio.create_task(stage.post("/v1/completions", {"prompt": "a", "libra": {"trajectory": "t"}}))
        while not recent.turns:
            await asyncio.sleep(0.005)
        assert page.view().waiting == 1
        turn.cancel()
        while recent.turns:
            await asyncio.sleep(0.005)


async def test_memory_has_a_bound() -> None:
    recent = Recent()
    async with staged(engines=1, watchers=[recent]) as stage:
        for _ in range(DECISIONS + 3):
            await stage.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1})
    assert recent.decided == DECISIONS + 3 and len(recent.decisions) == DECISIONS
    assert not recent.turns and not recent._engines


async def test_the_page_is_for_this_machine_and_its_token() -> None:
    recent = Recent()
    async with (
        staged(watchers=[recent]) as stage,
        router_page_at(0, "secret", stage.gateway, recent, "least-loaded") as address,
        ClientSession(address) as session,
    ):
        async with session.get("/version") as answer:
            assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        async with session.get("/", headers={"Accept": "text/html,*/*"}) as answer:
            assert answer.status == 401 and answer.headers["WWW-Authenticate"].startswith("Basic ")
        for wrong in ("Basic " + b64encode(b"secret").decode(), "Basic ?", "Basic " + b64encode(b"a:no").decode()):
            async with session.get("/version", headers={"Authorization": wrong}) as answer:
                assert answer.status == 401
        shown = {"Authorization": "Basic " + b64encode(b"anybody:secret").decode()}
        async with session.get("/version", headers=shown) as answer:
            assert answer.status == 200
        bearer = {"Authorization": "Bearer secret"}
        async with session.get("/version", headers=bearer | {"Host": "evil.example"}) as answer:
            assert answer.status == 403


# A browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SIZE = re.compile(r'data-size="(\d+) (\d+)"')


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1280, 500])
async def test_a_browser_shows_it_and_nothing_sticks_out(tmp_path: Path, width: int) -> None:
    recent = Recent()
    async with paged(recent) as (stage, page):
        await _traffic(stage)
        await page.look()
        await page.look()
        html = await page.newest()
    script = "document.body.dataset.size = document.documentElement.scrollWidth + ' ' + window.innerWidth;"
    file = tmp_path / "page.html"
    file.write_text(html.replace("</body>", f"<script>{script}</script></body>"))
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},2000", "--dump-dom", file.as_uri()]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=50, check=True)
    found = _SIZE.search(done.stdout)
    assert found is not None and int(found[1]) <= int(found[2]) == width
    assert ">t2 " in done.stdout and "holds the prefix" in done.stdout
