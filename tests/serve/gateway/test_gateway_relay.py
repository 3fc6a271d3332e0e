"""Engines that answer what no engine should: the client gets an answer or an error, in time, and nothing is counted."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.stage import STREAM_HEAD, Scripted, staged

from libra.serve.gateway import event_stream
from libra.serve.gateway.event_stream import EventStream, data_of

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
async def test_what_is_no_answer_is_asked_again_elsewhere(answer: bytes, stream: bool) -> None:
    async with staged(engines=1, scripted=[saying(answer)]) as stage:
        stage.engine("e0").load_tokens += 1  # so that the other is asked first
        async with (
            asyncio.timeout(10),
            stage.session.post("/v1/completions", json=TURN | {"stream": stream}) as response,
        ):
            text = await response.text()
        assert any(head.startswith(b"POST") for head in stage.scripted[0].heads)
        if stream or answer is not STREAM_HEAD:
            assert response.status == 200 and "choices" in text and stage.gateway.counts.retries == 1
        assert stage.engine("s0").in_flight == stage.engine("s0").turns == 0


async def test_a_turn_that_no_engine_answers_well_stops_none() -> None:
    async with staged(engines=1, scripted=[saying(b"what?\r\n\r\n"), saying(b"what?\r\n\r\n")]) as stage:
        stage.engine("e0").load_tokens += 1  # so that the others are asked first
        assert (await stage.post("/v1/completions", TURN))[0] == 200
        assert all(stage.engine(name).healthy for name in ("s0", "s1", "e0"))


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
async def test_an_odd_answer_passes_and_counts_for_nothing(answer: bytes, body: bytes, stream: bool) -> None:
    async with staged(engines=0, scripted=[saying(answer, close=False)]) as stage:
        async with stage.session.post("/v1/completions", json=TURN | {"stream": stream}) as response:
            assert response.status == 200 and body in await response.read()
        assert stage.gateway.counts.turns == 0
        assert (await stage.post("/trajectories/t/finish", {}))[0] == 400


def streamed(*events: str, end: str = "\n\n") -> bytes:
    return STREAM_HEAD + "".join(f"data: {event}{end}" for event in events).encode()


PIECE, LAST = '{"choices": [{"text": "a"}]}', f'{{"choices": [], {USAGE}}}'


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
async def test_usage_is_for_who_asked(end: str, options: dict[str, bool] | None) -> None:
    async with staged(engines=0, scripted=[saying(streamed(PIECE, LAST, "[DONE]", end=end))]) as stage:
        body = TURN | {"stream": True} | ({} if options is None else {"stream_options": options})
        async with stage.session.post("/v1/completions", json=body) as response:
            text = await response.text()
        assert ("usage" in text) == bool(options and options["include_usage"])
        assert text.startswith(f"data: {PIECE}{end}") and text.endswith(f"data: [DONE]{end}")
        assert (stage.gateway.counts.prompt_tokens, stage.gateway.counts.generated_tokens) == (30, 2)


async def test_an_event_with_usage_and_text_passes() -> None:
    both = f'{{"choices": [{{"text": "b"}}], {USAGE}}}'

    async with staged(engines=0, scripted=[saying(streamed(PIECE, both, "[DONE]"))]) as stage:
        async with stage.session.post("/v1/completions", json=TURN | {"stream": True}) as response:
            assert both in await response.text()
        assert stage.gateway.counts.generated_tokens == 2


ERROR = '{"error": {"message": "out of memory"}}'
CHUNKED = STREAM_HEAD.replace(b"Connection: close", b"Transfer-Encoding: chunked")
STOP = "event: message_stop\ndata: {}\n\n"
ENDS: dict[str, tuple[str, bytes]] = {
    "a keep-alive after the end": ("/v1/completions", streamed(PIECE, LAST, "[DONE]") + b": ping\n\n"),
    "another end after the end": ("/v1/messages", STREAM_HEAD + f"{STOP}data: [DONE]\n\n".encode()),
    "an error": ("/v1/completions", streamed(PIECE, ERROR)),
    "an error of messages": ("/v1/messages", STREAM_HEAD + f"event: error\ndata: {ERROR}\n\n".encode()),
    "no last chunk": ("/v1/completions", CHUNKED + b"e\r\ndata: [DONE]\n\n\r\n"),
}


@pytest.mark.parametrize("path, answer", ENDS.values(), ids=ENDS)
async def test_a_stream_is_whole_with_all_that_engines_end_it_with(path: str, answer: bytes) -> None:
    own = {"stream": True, "messages": [], "stream_options": {"include_usage": True}}
    async with staged(engines=0, scripted=[saying(answer)]) as stage:
        async with stage.session.post(path, json=TURN | own) as response:
            text = await response.text()
        assert "lost" not in text and text.strip().encode() in answer.replace(b"\r\n", b"")
        assert stage.engine("s0").healthy


@pytest.mark.parametrize("rest", ["", 'data: {"choi'])
async def test_a_stream_without_an_end_says_so(rest: str) -> None:
    async with staged(engines=0, scripted=[saying(streamed(PIECE) + rest.encode())]) as stage:
        async with stage.session.post("/v1/completions", json=TURN | {"stream": True}) as response:
            first, error, _ = (await response.text()).split("\n\n")
        assert first == f"data: {PIECE}"
        assert "the stream ended early" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert stage.gateway.counts.turns == 0


_pieces = st.sampled_from([b"\r", b"\n", b"\r\n", b"data: a", b"data:b", b"data", b": c", b"event: d", b"x", b"\n\n"])
_streams = st.lists(_pieces, max_size=25).map(b"".join)


def by_the_standard(stream: bytes) -> list[bytes]:
    """The data of each event, in a stream of which nothing is missing."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, data = [], []
    for line in text.split(b"\n")[:-1]:
        if not line:
            if data:
                events.append(b"\n".join(data))
            data = []
        elif line.partition(b":")[0] == b"data":
            value = line.partition(b":")[2]
            data.append(value[1:] if value.startswith(b" ") else value)
    return events


@given(_streams, st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_any_cut_gives_the_standards_events_and_the_same_bytes(stream: bytes, cuts: list[int], bom: bool) -> None:
    stream = b"\xef\xbb\xbf" * bom + stream
    parser, events = EventStream(), []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True):
        events += parser.feed(stream[begin:end])
    assert b"".join(events) + parser.rest() == stream
    assert [data_of(event) for event in events if data_of(event)] == [data for data in by_the_standard(stream) if data]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_events_pass_as_soon_as_they_end(end: bytes) -> None:
    parser = EventStream()
    assert [data_of(event) for event in parser.feed(b"data: 1" + end)] == [b"1"]
    assert [data_of(event) for event in parser.feed(b"data: 2" + end + b"data: 3")] == [b"2"]
    assert [data_of(event) for event in parser.feed(b"\ndata:4\n: and\n\n")] == [b"3\n4"]


def test_comments_pass_without_an_event() -> None:
    parser = EventStream()
    assert parser.feed(b": still here\n: and here") == [b": still here\n"]
    assert parser.feed(b"\ndata: 1\n") == [b": and here\n"]
    assert data_of(parser.rest()) == b"1"


def test_an_event_without_an_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_LARGEST_EVENT", 100)
    parser = EventStream()
    assert parser.feed(b"data: " + b"x" * 90) == []
    with pytest.raises(ValueError, match="a server-sent event of more than 100 bytes"):
        parser.feed(b"x" * 10)
