"""What a client may not send is refused in OpenAI's shape, by emulated engines as by the gateway, without noise."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession
from serve.stage import Stage, emulated, staged

from libra.serve import openai_errors

COMPLETIONS = "/v1/completions"
GZIP = {"Content-Encoding": "gzip"}
NESTED = b"[" * 100_000 + b"]" * 100_000
TOO_MUCH = 0  # 413, or 400 where it is the decompressor that gives up
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
    "too much gzip": ("POST", COMPLETIONS, gzip.compress(bytes(66_000_000)), GZIP, TOO_MUCH, ""),
    "elsewhere": ("POST", "/v1/embeddings", GOOD, {}, 404, "Not Found"),
    "otherwise": ("GET", COMPLETIONS, b"", {}, 405, "Method Not Allowed"),
}


def at(kind: str, test: Callable[[ClientSession], Awaitable[None]]) -> None:
    async def alone() -> None:
        async with emulated() as (base, _), ClientSession(base) as session:
            await test(session)

    async def behind(stage: Stage) -> None:
        await test(stage.session)

    if kind == "emulate":
        asyncio.run(alone())
    else:
        staged(behind, engines=1)


@pytest.mark.parametrize("kind", ["emulate", "route"])
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_openais_shape(
    kind: str, case: tuple[str, str, bytes, dict[str, str], int, str], caplog: pytest.LogCaptureFixture
) -> None:
    method, path, body, headers, status, says = case
    if kind == "emulate" and path.startswith("/trajectories"):
        status = 404

    async def test(session: ClientSession) -> None:
        async with session.request(method, path, data=body, headers=headers) as response:
            said: dict[str, Any] = await response.json()
        assert response.status == said["error"]["code"] and says in said["error"]["message"]
        assert response.status == status or (status == TOO_MUCH and response.status in (400, 413))
        async with session.post(COMPLETIONS, data=GOOD) as response:  # and nobody else minds
            assert response.status == 200

    at(kind, test)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


@pytest.mark.parametrize("kind", ["emulate", "route"])
def test_a_body_that_does_not_come_is_not_waited_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_errors, "_BODY_SECONDS", 0.2)

    async def test(session: ClientSession) -> None:
        port = session._base_url.port  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: me\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == b"408"
            assert b"did not arrive within 0.2 s" in await reader.readuntil(b"}}")
        writer.close()

    at(kind, test)


@pytest.mark.parametrize(
    "body", [{"prompt": "x" * 100_000}, {"messages": [{"role": "user", "content": "x" * 100_000}]}]
)
def test_a_prompt_is_measured_before_it_becomes_tokens(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens_of(_: str) -> tuple[int, ...]:
        raise AssertionError("tokenised")

    monkeypatch.setattr("libra.serve.emulate.openai.tokens_of", tokens_of)

    async def test(session: ClientSession) -> None:
        path = COMPLETIONS if "prompt" in body else "/v1/chat/completions"
        async with session.post(path, data=json.dumps(body)) as response:
            assert response.status == 400 and "leaves no room to generate" in await response.text()

    at("emulate", test)
