"""Engines that answer what no engine should: the client gets an answer or an error, in time, and nothing is counted."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from serve.stage import STREAM_HEAD, Scripted, Stage, staged

TURN: dict[str, Any] = {"prompt": [5] * 30, "max_tokens": 10, "libra": {"trajectory": "t"}}
USAGE = '"usage": {"prompt_tokens": 30, "completion_tokens": 2}'


def whole(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode("utf-8", errors="surrogateescape") + body


def saying(answer: bytes, close: bool = True) -> Scripted:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if close:
            await writer.drain()
            raise ConnectionResetError

    return Scripted(script)


LOST = {
    "no HTTP": b"\x00\x01 hello\r\n\r\n",
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "half a body": whole(b'{"choices"', length=1000),
    "half a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
    "no chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nmany\r\n{",
    "two lengths": whole(b"{}", "Content-Length: 7"),
    "a long head": b"HTTP/1.1 200 OK\r\nLong: " + b"x" * 100_000 + b"\r\n\r\n",
    "an empty stream": STREAM_HEAD,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", LOST.values(), ids=LOST)
def test_what_is_no_answer_is_asked_again_elsewhere(answer: bytes, stream: bool) -> None:
    async def test(stage: Stage) -> None:
        stage.gateway.upstreams.mark_unhealthy("e0")  # so that the other is asked first
        turn = asyncio.create_task(stage.session.post("/v1/completions", json=TURN | {"stream": stream}))
        while not any(head.startswith(b"POST") for head in stage.scripted[0].heads):
            await asyncio.sleep(0.005)
        stage.gateway.upstreams.mark_healthy("e0")
        async with asyncio.timeout(10):
            response = await turn
            text = await response.text()
        if stream or answer is not STREAM_HEAD:
            assert response.status == 200 and "choices" in text and stage.gateway.counts.retries == 1
        assert stage.gateway.upstreams.all["s0"].in_flight == stage.gateway.upstreams.all["s0"].turns == 0

    staged(test, engines=1, scripted=[saying(answer)])


PASSED: list[tuple[bytes, bytes]] = [
    (whole(b"<html>"), b"<html>"),
    (whole(b'{"usage": 7}'), b'{"usage": 7}'),
    (whole(b'{"usage": {"prompt_tokens": -1, "completion_tokens": 2}}'), b"-1"),
    (whole(b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1e99}}'), b"1e99"),
    (whole(b"[" * 100_000), b"[[["),
    (whole(b"{}", "Content-Type: text/\udcff\udcfe", "Retry-After: \udcff"), b"{}"),
    (whole(gzip.compress(b"squeezed", mtime=0), "Content-Encoding: gzip"), b"squeezed"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("answer", "body"), PASSED)
def test_an_odd_answer_passes_and_counts_for_nothing(answer: bytes, body: bytes, stream: bool) -> None:
    async def test(stage: Stage) -> None:
        async with stage.session.post("/v1/completions", json=TURN | {"stream": stream}) as response:
            assert response.status == 200 and body in await response.read()
        assert stage.gateway.counts.turns == 0
        assert (await stage.post("/trajectories/t/finish", {}))[0] == 400

    staged(test, engines=0, scripted=[saying(answer, close=False)])


def streamed(*events: str, end: str = "\n\n") -> bytes:
    return STREAM_HEAD + "".join(f"data: {event}{end}" for event in events).encode()


PIECE, LAST = '{"choices": [{"text": "a"}]}', f'{{"choices": [], {USAGE}}}'


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_usage_is_for_who_asked(end: str, options: dict[str, bool] | None) -> None:
    async def test(stage: Stage) -> None:
        body = TURN | {"stream": True} | ({} if options is None else {"stream_options": options})
        async with stage.session.post("/v1/completions", json=body) as response:
            text = await response.text()
        assert ("usage" in text) == bool(options and options["include_usage"])
        assert text.startswith(f"data: {PIECE}{end}") and text.endswith(f"data: [DONE]{end}")
        assert (stage.gateway.counts.prompt_tokens, stage.gateway.counts.generated_tokens) == (30, 2)

    staged(test, engines=0, scripted=[saying(streamed(PIECE, LAST, "[DONE]", end=end))])


def test_an_event_with_usage_and_text_passes() -> None:
    both = f'{{"choices": [{{"text": "b"}}], {USAGE}}}'

    async def test(stage: Stage) -> None:
        async with stage.session.post("/v1/completions", json=TURN | {"stream": True}) as response:
            assert both in await response.text()
        assert stage.gateway.counts.generated_tokens == 2

    staged(test, engines=0, scripted=[saying(streamed(PIECE, both, "[DONE]"))])


@pytest.mark.parametrize("rest", ["", 'data: {"choi'])
def test_a_stream_without_an_end_says_so(rest: str) -> None:
    async def test(stage: Stage) -> None:
        async with stage.session.post("/v1/completions", json=TURN | {"stream": True}) as response:
            first, error, _ = (await response.text()).split("\n\n")
        assert first == f"data: {PIECE}"
        assert "the stream ended before its end" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert stage.gateway.counts.turns == 0

    staged(test, engines=0, scripted=[saying(streamed(PIECE) + rest.encode())])
