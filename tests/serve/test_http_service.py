"""What is sent to a port that is no HTTP is its sender's mistake: 400, and nothing on the terminal."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from aiohttp import web

from libra.serve.http_service import serving

LONG = b"x" * 20_000


async def answers(sent: bytes, good: int = 0) -> list[bytes]:
    """The status lines that a visitor gets who sends this after so many good requests."""

    async def root(_: web.Request) -> web.Response:
        return web.Response(text="here")

    async def broken(_: web.Request) -> web.Response:
        raise RuntimeError("a fault of ours")

    application = web.Application()
    application.router.add_get("/", root)
    application.router.add_get("/broken", broken)
    async with serving(application, "127.0.0.1", 0) as base:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
        said = b""
        for _ in range(good):
            writer.write(b"GET / HTTP/1.1\r\nHost: me\r\n\r\n")
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
        b"GET / HTTP/1.1\r\nHost: me\r\nno colon\r\n\r\n",
        b"GET / HTTP/9.9.9\r\nHost: me\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: me\r\nContent-Length: many\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: me\r\nLong: " + LONG + b"\r\n\r\n",
        b"GET /" + LONG + b" HTTP/1.1\r\nHost: me\r\n\r\n",
    ],
)
@pytest.mark.parametrize("good", [0, 1])
def test_what_is_no_http_is_refused_without_noise(
    sent: bytes, good: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    found = asyncio.run(answers(sent, good))
    assert found[-1].split()[1] == b"400", found
    assert [line.split()[1] for line in found[:-1]] == [b"200"] * good
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    assert capfd.readouterr().err == ""


def test_what_was_sent_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    [line] = asyncio.run(answers(b"GET / HTTP/1.1\r\nHost: me\r\nAuthorization Bearer s3cr3t\r\n\r\n"))
    assert line.split()[1] == b"400"
    assert "BadHttp" in caplog.text and "s3cr3t" not in caplog.text


def test_a_body_that_nobody_reads_may_be_damaged(caplog: pytest.LogCaptureFixture) -> None:
    sent = b"GET / HTTP/1.1\r\nHost: me\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd"
    assert [line.split()[1] for line in asyncio.run(answers(sent))] == [b"200"]
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_a_fault_of_ours_is_told(caplog: pytest.LogCaptureFixture) -> None:
    [line] = asyncio.run(answers(b"GET /broken HTTP/1.1\r\nHost: me\r\n\r\n"))
    assert line.split()[1] == b"500"
    assert "a fault of ours" in caplog.text
