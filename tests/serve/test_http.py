"""What a client may not send is refused without noise, by emulated engines as by the gateway; and collections come with
connections that leave something."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import re
import socket
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession, web
from serve.stage import emulated, staged

from libra.config.listeners import EMULATOR, HttpLimits
from libra.serve import http
from libra.serve.connections import Connections
from libra.serve.http import collecting_rarely, serving

LONG = b"x" * 20_000


async def answers(sent: bytes, good: int = 0, limits: HttpLimits = EMULATOR) -> list[bytes]:
    """The status lines that a visitor gets who sends this after so many good requests."""

    async def root(_: web.Request) -> web.Response:
        return web.Response(text="here")

    async def broken(_: web.Request) -> web.Response:
        raise RuntimeError("a fault of ours")

    application = web.Application()
    application.router.add_get("/", root)
    application.router.add_get("/broken", broken)
    async with serving(application, "127.0.0.1", 0, limits) as base:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
        said = b""
        for _ in range(good):
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            said += await reader.readuntil(b"here")
        writer.write(sent)
        said += await asyncio.wait_for(reader.read(), 20.0)
        writer.close()
        return re.findall(rb"HTTP/\d\.\d \d+", said)


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",  # who wants to speak TLS
        b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
        b"GET / HTTP/9.9.9\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: many\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nLong: " + LONG + b"\r\n\r\n",
        b"GET /" + LONG + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
@pytest.mark.parametrize("good", [0, 1])
async def test_what_is_no_http_is_refused_without_noise(
    sent: bytes, good: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    found = await answers(sent, good)
    assert found[-1].split()[1] == b"400", found
    assert [line.split()[1] for line in found[:-1]] == [b"200"] * good
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert capfd.readouterr().err == ""


async def test_what_was_sent_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    [line] = await answers(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization Bearer s3cr3t\r\n\r\n")
    assert line.split()[1] == b"400"
    assert "BadHttp" in caplog.text and "s3cr3t" not in caplog.text


async def test_a_body_that_nobody_reads_may_be_damaged(caplog: pytest.LogCaptureFixture) -> None:
    sent = b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n"
    sent += b"Connection: close\r\n\r\nabcd"
    assert [line.split()[1] for line in await answers(sent)] == [b"200"]
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


async def test_a_fault_of_ours_is_told(caplog: pytest.LogCaptureFixture) -> None:
    [line] = await answers(b"GET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert line.split()[1] == b"500"
    assert "a fault of ours" in caplog.text


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nAnd"])
async def test_who_never_ends_a_request_is_left(sent: bytes) -> None:
    assert await answers(sent, limits=replace(EMULATOR, idle_seconds=0.2)) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_who_takes_nothing_of_an_answer_is_left(stream: bool) -> None:
    ended = asyncio.Event()

    async def much(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            while True:
                await response.write(bytes(2**16 if stream else 2**26))
        finally:
            ended.set()

    application = web.Application()
    application.router.add_get("/", much)
    async with serving(application, "127.0.0.1", 0, replace(EMULATOR, stalled_seconds=0.5)) as base:
        with socket.create_connection(("127.0.0.1", int(base.rsplit(":", 1)[1]))) as visitor:
            visitor.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(20):
                await ended.wait()


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_connections_that_leave_something_lead_to_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_COLLECT_SECONDS", 0.01)
    monkeypatch.setattr(http, "_CONNECTIONS", 10_000)
    collected: list[str] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    async def serve() -> None:
        connections = Connections(EMULATOR)
        async with collecting_rarely(connections):
            assert gc.get_freeze_count() > 0
            gc.callbacks.append(noted)
            gone = weakref.ref(Circle())
            connections.made = 10_000
            for _ in range(20):  # they leave nothing: requests come and go
                assert len([Circle.__new__(Circle) for _ in range(20_000)]) == 20_000
                await asyncio.sleep(0.01)
            assert not collected and connections.made == 10_000
            connections.made = 9_999
            waiting = [Circle() for _ in range(100_000)]  # grown, but not by what connections leave
            await asyncio.sleep(0.2)
            assert not collected and gone() is not None
            connections.made += 1
            async with asyncio.timeout(20):
                while gone() is not None:
                    await asyncio.sleep(0.01)
            assert collected == ["start", "stop"] and connections.made == 0
            assert len(waiting) == 100_000

    try:
        asyncio.run(serve())
    finally:
        gc.callbacks.remove(noted)
    assert gc.isenabled() and gc.get_freeze_count() == 0


COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
GZIP = {"Content-Encoding": "gzip"}
NESTED = b"[" * 100_000 + b"]" * 100_000
GOOD = b'{"prompt": "hello", "max_tokens": 5}'

REFUSED: dict[str, tuple[str, str, bytes, dict[str, str], int, str]] = {
    "no JSON": ("POST", COMPLETIONS, b"{", {}, 400, "truncated"),
    "no UTF-8": ("POST", COMPLETIONS, b'{"prompt": "\xff"}', {}, 400, ""),
    "nested": ("POST", COMPLETIONS, b'{"x": ' + NESTED + b"}", {}, 400, "nested too deeply"),
    "nested prompt": ("POST", COMPLETIONS, b'{"prompt": ' + NESTED + b"}", {}, 400, ""),
    "nested end": ("POST", "/trajectories/t/finish", b'{"x": ' + NESTED + b"}", {}, 400, ""),
    "no gzip": ("POST", COMPLETIONS, GOOD, GZIP, 400, "the body cannot be read"),
    "half a gzip": ("POST", COMPLETIONS, gzip.compress(GOOD)[:-12], GZIP, 400, ""),
    "too much": ("POST", COMPLETIONS, b'{"prompt": "' + b"x" * 66_000_000 + b'"}', {}, 413, ""),
    "too much gzip": ("POST", COMPLETIONS, gzip.compress(bytes(68_000_000)), GZIP, 413, ""),
    "elsewhere": ("POST", "/v1/embeddings", GOOD, {}, 404, "Not Found"),
    "otherwise": ("GET", COMPLETIONS, b"", {}, 405, "Method Not Allowed"),
}


@asynccontextmanager
async def served(kind: str, limits: HttpLimits = EMULATOR) -> AsyncIterator[ClientSession]:
    if kind == "emulate":
        async with emulated("e", limits=limits) as (base, _), ClientSession(base, headers=JSON) as session:
            yield session
    else:
        async with staged(engines=1, limits=limits) as stage, ClientSession(stage.base, headers=JSON) as session:
            yield session


@pytest.mark.parametrize("kind", ["emulate", "route"])
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
async def test_it_is_refused_in_openais_shape(
    kind: str, case: tuple[str, str, bytes, dict[str, str], int, str], caplog: pytest.LogCaptureFixture
) -> None:
    method, path, body, headers, status, says = case
    if kind == "emulate" and path.startswith("/trajectories"):
        status = 404

    async with served(kind) as session:
        async with session.request(method, path, data=body, headers=headers) as response:
            said: dict[str, Any] = await response.json()
        assert response.status == said["error"]["code"] and says in said["error"]["message"]
        assert response.status == status
        async with session.post(COMPLETIONS, data=GOOD) as response:  # and nobody else minds
            assert response.status == 200
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


@pytest.mark.parametrize("kind", ["emulate", "route"])
async def test_a_body_that_does_not_come_is_not_waited_for(kind: str) -> None:
    async with served(kind, replace(EMULATOR, body_seconds=0.2)) as session:
        port = session._base_url.port  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == b"408"
            assert b"did not arrive within 0.2 s" in await reader.readuntil(b"}}")
        writer.close()


@pytest.mark.parametrize(
    "body", [{"prompt": "x" * 100_000}, {"messages": [{"role": "user", "content": "x" * 100_000}]}]
)
async def test_a_prompt_is_measured_before_it_becomes_tokens(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens_of(_: str) -> tuple[int, ...]:
        raise AssertionError("tokenised")

    monkeypatch.setattr("libra.serve.emulate.openai.tokens_of", tokens_of)

    async with served("emulate") as session:
        path = COMPLETIONS if "prompt" in body else "/v1/chat/completions"
        async with session.post(path, data=json.dumps(body)) as response:
            assert response.status == 400 and "leaves no room to generate" in await response.text()
