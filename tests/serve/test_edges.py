"""Limits of the HTTP listeners, each reached by a client that means harm, while another one is served."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from serve.stage import emulated

from libra.config.listeners import EMULATOR, ENGINES, GATEWAY, ID_LENGTH, METRICS, TRAJECTORIES, WEIGHTS, HttpLimits
from libra.serve.bodies import body_of
from libra.serve.connections import CONNECTIONS, within_open_files
from libra.serve.guard import read_token
from libra.serve.http import serving

JSON = {"Content-Type": "application/json"}


class Listener:
    """A port that echoes the length of bodies, and holds `/held` until it is let go."""

    def __init__(self, body_bytes: int = 2**20) -> None:
        self.go, self.holding = asyncio.Event(), 0
        self.application = web.Application(client_max_size=body_bytes)
        self.application.router.add_get("/", self._root)
        self.application.router.add_get("/health", self._root)
        self.application.router.add_post("/", self._length)
        self.application.router.add_post("/held", self._held)

    async def _root(self, _: web.Request) -> web.Response:
        return web.Response(text="here")

    async def _length(self, request: web.Request) -> web.Response:
        return web.json_response(len(await body_of(request)))

    async def _held(self, request: web.Request) -> web.Response:
        await body_of(request)
        self.holding += 1
        await self.go.wait()
        return web.Response()

    @asynccontextmanager
    async def at(self, limits: HttpLimits = EMULATOR, token: str | None = None) -> AsyncIterator[ClientSession]:
        async with serving(self.application, "127.0.0.1", 0, limits, token) as base, ClientSession(base) as session:
            yield session


async def idle(session: ClientSession) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = session._base_url.port  # type: ignore[union-attr]
    return await asyncio.open_connection("127.0.0.1", port)


async def test_idle_connections_make_room_for_a_request() -> None:
    listener = Listener()
    async with listener.at(METRICS) as session:
        strangers = [await idle(session) for _ in range(10 * METRICS.connections)]
        async with session.get("/") as response:
            assert response.status == 200
        kept = listener.application[CONNECTIONS]
        assert len(kept.idle) + len(kept.busy) <= METRICS.connections
        assert await asyncio.wait_for(strangers[0][0].read(), 10.0) == b""  # the first was closed
        for _, writer in strangers:
            writer.close()


async def test_connections_of_one_moment_are_no_more_than_the_limit() -> None:
    """They are accepted together, so some give way before they have a transport."""
    listener = Listener()
    async with listener.at(METRICS) as session:
        port = session._base_url.port  # type: ignore[union-attr]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(4 * METRICS.connections)]
        async with session.get("/") as response:  # is accepted after them
            assert response.status == 200
        closed = 0
        for stranger in strangers:
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                closed += isinstance(reset_or_end(stranger), bytes)
            stranger.close()
        assert closed >= len(strangers) - METRICS.connections


def reset_or_end(stranger: socket.socket) -> bytes:
    """Bytes that a closed connection reads. Raises `BlockingIOError` for an open one."""
    try:
        return stranger.recv(1)
    except ConnectionResetError:
        return b""


async def test_a_connection_beyond_busy_ones_is_refused_with_an_answer() -> None:
    listener = Listener()
    async with listener.at(replace(EMULATOR, connections=2)) as session:
        held = [asyncio.create_task(posted(session, "/held", b"{}")) for _ in range(2)]
        while listener.holding < 2:
            await asyncio.sleep(0.01)
        status, said = await posted(session, "/", b"{}")
        assert status == said["error"]["code"] == 503 and "too many connections" in said["error"]["message"]
        listener.go.set()
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await posted(session, "/", b"{}"))[0] == 200


async def posted(
    session: ClientSession, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    async with session.post(path, data=body, headers=JSON | (headers or {})) as response:
        text = await response.text()
        return response.status, json.loads(text) if text else None


GZIP, BODY = {"Content-Encoding": "gzip"}, b'{"x": "' + bytes(1000) + b'"}'
BOMB = gzip.compress(bytes(2**27))


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (BODY, {}, 200, ""),
        (gzip.compress(BODY), GZIP, 200, ""),
        (gzip.compress(b""), GZIP, 200, ""),
        (gzip.compress(bytes(2**20)), GZIP, 200, ""),
        (bytes(2**20 + 1), {}, 413, "1048576 bytes"),
        (BOMB, GZIP, 413, "1048576 bytes"),
        (gzip.compress(gzip.compress(BODY)), {"Content-Encoding": "gzip, gzip"}, 415, "Content-Encoding"),
        (BODY, {"Content-Encoding": "br"}, 415, "'br'"),
        (BODY, GZIP, 400, "cannot be read"),
        (gzip.compress(BODY)[:-9], GZIP, 400, "ends early"),
        (gzip.compress(BODY) * 2, GZIP, 400, "after its compressed end"),
    ],
    ids=["plain", "gzip", "empty", "zeros", "large", "bomb", "gzip twice", "brotli", "no gzip", "cut", "two members"],
)
async def test_a_body_is_measured_before_and_after_decompression(
    body: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    listener = Listener()
    async with listener.at() as session:
        found, said = await posted(session, "/", body, headers)
        assert found == status and says in str(said)
        assert listener.application[CONNECTIONS].body_bytes == 0


async def test_bodies_in_flight_have_a_limit_that_small_ones_do_not_meet() -> None:
    listener, limits = Listener(), replace(EMULATOR, bodies_bytes=2**20 - 100, free_bytes=100)
    async with listener.at(limits) as session:
        held = asyncio.create_task(posted(session, "/held", bytes(2**20)))
        while not listener.holding:
            await asyncio.sleep(0.01)
        status, said = await posted(session, "/", bytes(200))
        assert status == 503 and "bodies in flight" in said["error"]["message"]
        assert await posted(session, "/", bytes(100)) == (200, 100)
        listener.go.set()
        assert (await held)[0] == 200
        assert await posted(session, "/", bytes(200)) == (200, 200)


async def test_no_piece_of_a_bomb_holds_the_loop() -> None:
    """While it is decompressed, the loop turns at least once for each MiB."""
    listener, turns = Listener(2**26), 0
    async with listener.at() as session:
        bomb = asyncio.create_task(posted(session, "/", gzip.compress(bytes(2**26)), GZIP))
        while not bomb.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await bomb) == (200, 2**26) and turns > 2**26 / 2**20


@contextmanager
def few_files(more: int) -> Iterator[None]:
    """Leaves this process `more` file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open("/dev/null", os.O_RDONLY)
    os.close(taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_no_descriptor_for_a_connection_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    async with listener.at() as session:
        port = session._base_url.port  # type: ignore[union-attr]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]  # neither is accepted yet
        with few_files(1):
            await asyncio.sleep(1.5)  # asyncio tries again after a second
        assert len([record for record in caplog.records if record.levelno > logging.DEBUG]) == 1
        assert "ulimit -n" in caplog.text and "Traceback" not in caplog.text
        for stranger in strangers:
            stranger.close()
        async with session.get("/") as response:
            assert response.status == 200


def test_the_limit_of_open_files_holds() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert within_open_files(GATEWAY).connections == 64
        assert within_open_files(METRICS) == METRICS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


POSTS = {
    "form": ({"Content-Type": "application/x-www-form-urlencoded"}, b"x=1", 415),
    "text": ({"Content-Type": "text/plain"}, b"{}", 415),
    "blob": ({"Content-Type": "application/octet-stream"}, b"{}", 415),
    "json": (JSON, b"{}", 200),
    "json with a charset": ({"Content-Type": "application/json; charset=utf-8"}, b"{}", 200),
    "nothing": ({}, b"", 200),
    "nothing, of a page": ({"Origin": "https://example.com"}, b"", 403),
    "nothing, of a frame": ({"Origin": "null"}, b"", 403),
    "nothing, fetched": ({"Sec-Fetch-Site": "cross-site"}, b"", 403),
    "another port": (JSON | {"Origin": "http://127.0.0.1:1"}, b"{}", 403),
    "another name": (JSON | {"Host": "rebound.example.com"}, b"{}", 403),
    "a name like it": (JSON | {"Host": "127.0.0.1.example.com"}, b"{}", 403),
    "no name": (JSON | {"Host": "[::1"}, b"{}", 403),
    "localhost": (JSON | {"Host": "localhost:80"}, b"{}", 200),
    "six": (JSON | {"Host": "[::1]:80"}, b"{}", 200),
}


@pytest.mark.parametrize("case", POSTS.values(), ids=POSTS)
async def test_a_page_in_a_browser_changes_nothing(case: tuple[dict[str, str], bytes, int]) -> None:
    headers, body, status = case
    async with Listener().at() as session, session.post("/", data=body or None, headers=headers) as response:
        assert response.status == status
        if status != 200:
            assert (await response.json())["error"]["code"] == status


async def test_a_page_in_a_browser_reads_nothing() -> None:
    async with Listener().at() as session, session.get("/", headers={"Host": "rebound.example.com"}) as response:
        assert response.status == 403 and "Host" in await response.text()


@pytest.mark.parametrize(
    ("path", "shown", "status"),
    [
        ("/", None, 401),
        ("/", "Bearer wrong", 401),
        ("/", "Basic t0ken", 401),
        ("/", "Bearer t0ken", 200),
        ("/", "bearer t0ken", 200),
        ("/health", None, 200),
    ],
)
async def test_a_token_is_asked_for(path: str, shown: str | None, status: int) -> None:
    headers = {} if shown is None else {"Authorization": shown}
    async with Listener().at(token="t0ken") as session, session.get(path, headers=headers) as response:
        assert response.status == status and "t0ken" not in await response.text()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
async def test_other_machines_need_a_token(host: str) -> None:
    with pytest.raises(ValueError, match="--token-file"):
        async with serving(Listener().application, host, 0):
            pass


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        ("", 0o600, "the content is not a token"),
        ("a b", 0o600, "the content is not a token"),
        ("tökén", 0o600, "the content is not a token"),
        ("abc\n", 0o644, "chmod 600"),
        ("a" * 5000, 0o600, "does not fit a header"),
    ],
)
def test_a_token_file_is_refused(tmp_path: Path, content: str, mode: int, says: str) -> None:
    file = tmp_path / "token"
    file.write_text(content, encoding="utf-8")
    file.chmod(mode)
    with pytest.raises(ValueError, match=says):
        read_token(file)
    file.write_text("abc\n", encoding="utf-8")
    file.chmod(0o600)
    assert read_token(file) == "abc"


def test_a_token_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("abc\n", encoding="utf-8")
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(file, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(ValueError, match=r"belongs to user \d+, who can read the token"):
        read_token(file)


def test_a_token_file_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="the token cannot be read; give a regular file"):
            read_token(path)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_emulated_engine_is_behind_the_same_guard(path: str) -> None:
    async with emulated("e") as (base, _), ClientSession(base) as session:
        assert (await posted(session, path, b"{}", {"Content-Type": "text/plain"}))[0] == 415


def test_the_limits_in_security_md_are_those_in_force() -> None:
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(): cells[2:5] for line in text.splitlines() if len(cells := line.split("|")) == 7}
    listeners = (GATEWAY, EMULATOR, METRICS)
    for row, name in (("connections", "connections"), ("seconds without a complete request", "idle_seconds")):
        assert [cell.strip() for cell in rows[row]] == [f"{getattr(it, name):,.0f}" for it in listeners]
    assert rows["seconds for a body"][0].strip() == f"{GATEWAY.body_seconds:.0f}"
    body = f"{GATEWAY.body_base >> 20} MiB and {GATEWAY.body_per_token} bytes for each token of the longest context"
    most = rows["bytes of a body, as sent and decompressed"]
    assert most[0].strip() == f"{body}, {GATEWAY.body_bytes >> 20} MiB at most"
    assert most[1].strip() == f"{EMULATOR.body_base >> 20} MiB and the same"
    assert f"{GATEWAY.bodies_bytes >> 30} GiB" in text and f"{GATEWAY.free_bytes >> 10} KiB of each" in text
    assert f"keeps at most {WEIGHTS.strangers} connections" in text and f"{WEIGHTS.hello_bytes >> 10} KiB" in text
    assert (
        f"{WEIGHTS.hello_chunk_bytes} bytes for each chunk" in text
        and str(ID_LENGTH) in text
        and f"{TRAJECTORIES:,}" in text
        and f"{ENGINES:,}" in text
    )
