"""One turn on one engine: forwards the body, and passes the answer back unchanged.

Invariant: until the first byte of an answer has reached the client, an engine's failure gives no response, and the
caller may retry elsewhere; after that it is an error event at the end of the stream. The events' bytes, joined, are the
stream's bytes. That is why an event stream is no library's: parsers give the fields of an event without its bytes
(https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, web

from libra.serve.answers import decoded, refusal, refused
from libra.serve.gateway.trajectories import Tokens
from libra.serve.gateway.upstreams import Attempt, TurnFailure, untraced

_GONE = {502, 503, 504}  # statuses of a server that cannot
_LARGEST_ANSWER = 256 * 2**20  # bytes of one in one piece
_SENT = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # it is read on its way
_PASSED = ("Content-Type", "Content-Encoding", "Retry-After", "Server-Timing")  # headers of an answer
_USAGE = b'"usage"'
_EVENT_STREAM = "text/event-stream"
_LARGEST_EVENT = 64 * 2**20  # bytes of one event
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")
_EVENT_END = re.compile(rb"(?>\r\n|\r|\n)(?:\r\n|\r|\n)")  # the end of a line, and an empty line

Usage = tuple[int, int]  # tokens of the prompt, and generated


@dataclass(frozen=True, slots=True)
class Relayed:
    """A turn that an engine had."""

    response: web.StreamResponse | None  # to the client; None: nothing has reached it, and the turn may be retried
    usage: Usage | None = None  # None: not answered, or the engine did not report it
    failure: TurnFailure | None = None  # of the engine, perhaps in the middle of a stream


async def relay(
    session: ClientSession,
    request: web.Request,
    authorization: Mapping[str, str],
    attempt: Attempt,
    body: bytes,
    *,
    stream: bool,
    usage: bool,
) -> Relayed:
    """Send `body` to the path that was asked for. `usage`: whether the client wants a stream's usage event."""
    engine = attempt.engine
    url, headers = f"{engine.section.url}/{request.match_info['path']}", {**_SENT, **authorization}
    response: web.StreamResponse | None = None
    try:
        async with (
            attempt,
            session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
        ):
            if stream and answer.status == 200 and answer.content_type == _EVENT_STREAM:
                response = web.StreamResponse(headers={"Content-Type": _EVENT_STREAM, "Cache-Control": "no-cache"})
                return Relayed(response, await _stream(request, response, attempt, answer, usage))
            return await _whole(attempt, answer)
    except (ClientError, OSError, ValueError) as error:  # ValueError: an answer that is no HTTP
        untraced(error)
        why = str(error) or type(error).__name__
    failure = attempt.failure or TurnFailure(f"engine {engine.id} went away: {why}")
    if response is not None and response.prepared:
        said = refusal(f"{failure.message}; ask again from what has come", 503)
        await _write(response, request, b"data: " + said + b"\n\n")
        return Relayed(response, failure=failure if failure.of_engine else None)
    return Relayed(None if failure.of_engine else refused(failure.message, 504), failure=failure)


async def _whole(attempt: Attempt, answer: ClientResponse) -> Relayed:
    engine, pieces, size = attempt.engine, [], 0
    while piece := await answer.content.readany():
        attempt.touch()
        pieces.append(piece)
        size += len(piece)
        if size > _LARGEST_ANSWER:
            raise ValueError(f"an answer of more than {_LARGEST_ANSWER} bytes")
    attempt.touch()
    if 300 <= answer.status < 400:
        message = f"engine {engine.id} redirects with status {answer.status}: list its final address"
        return Relayed(refused(message, 502))
    whole = b"".join(pieces)
    said = ((name, answer.headers.get(name, "")) for name in _PASSED)
    headers = {name: value for name, value in said if value and value.isascii() and value.isprintable()}
    response = web.Response(body=whole, status=answer.status, headers=headers)
    if answer.status in _GONE:
        failure = TurnFailure(f"engine {engine.id} answered with status {answer.status}", answer=response)
        return Relayed(None, failure=failure)
    usage = usage_of(whole)[0] if answer.status == 200 else None
    engine.turns += usage is not None
    return Relayed(response, usage)


async def _stream(
    request: web.Request, response: web.StreamResponse, attempt: Attempt, answer: ClientResponse, wants_usage: bool
) -> Usage | None:
    """Pass events on as they end. None: the client has gone, or the engine reported no usage."""
    events, usage = EventStream(), None
    latest = b""  # event
    while chunk := await answer.content.readany():
        attempt.touch()
        passed = []
        for event in events.feed(chunk):
            latest = event
            if _USAGE in event:
                found, says_more = usage_of(data_of(event))
                usage = found or usage
                if not (wants_usage or says_more):
                    continue
            passed.append(event)
        if passed and not await _write(response, request, b"".join(passed)):  # up to the first a retry is possible
            return None
    rest = events.rest()
    if rest:
        latest, (found, _) = rest, usage_of(data_of(rest))
        usage = found or usage
    if usage is None and b"[DONE]" not in latest:
        raise ValueError("the stream ended before its end")
    attempt.engine.turns += usage is not None
    if rest:
        await _write(response, request, rest)
    return usage


async def _write(response: web.StreamResponse, request: web.Request, data: bytes) -> bool:
    """Write to the client. False: it has gone."""
    try:
        if not response.prepared:
            await response.prepare(request)
        await response.write(data)
    except ConnectionError:
        return False
    return True


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens
    completion_tokens: Tokens


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] = []


_answer = msgspec.json.Decoder(_Answer)


def usage_of(answer: bytes) -> tuple[Usage | None, bool]:
    """(prompt, generated) tokens if an answer or an event reports them, and whether it holds anything else."""
    try:
        read = decoded(_answer, answer)
    except ValueError:
        return None, True
    usage = None if read.usage is None else (read.usage.prompt_tokens, read.usage.completion_tokens)
    return usage, usage is None or bool(read.choices)


def data_of(event: bytes) -> bytes:
    """The values of its `data` fields, each a line."""
    values = []
    for line in _LINE_END.split(event.removeprefix(_BOM)):
        field, _, value = line.partition(b":")
        if field == b"data":
            values.append(value.removeprefix(b" "))
    return b"\n".join(values)


class EventStream:
    """Call `feed` with each chunk, and `rest` at the end of the stream."""

    def __init__(self) -> None:
        self._held = bytearray()  # the unfinished event
        self._after_cr = False  # a line feed that follows belongs to the carriage return before it

    def feed(self, chunk: bytes) -> list[bytes]:
        """Finished events, each with the empty line at its end, and comment lines at once: they are keep-alives. Raises
        ValueError for an event that grows without end."""
        held = self._held
        if not held and not self._after_cr and b"\r" not in chunk:
            *events, rest = chunk.split(b"\n\n")
            if not rest:  # as engines send them
                return [event + b"\n\n" for event in events]
        events = []
        if self._after_cr and chunk.startswith(b"\n"):
            events.append(b"\n")
            chunk = chunk[1:]
        searched = max(0, len(held) - 2)
        held += chunk
        begin = 0
        for end in _EVENT_END.finditer(held, searched):
            events.append(bytes(held[begin : end.end()]))
            begin = end.end()
        while held.startswith(b":", begin) and (line := _LINE_END.search(held, begin)) is not None:
            events.append(bytes(held[begin : line.end()]))
            begin = line.end()
        self._after_cr = 0 < begin == len(held) and held[-1] == ord("\r")
        del held[:begin]
        if len(held) > _LARGEST_EVENT:
            raise ValueError(f"a server-sent event of more than {_LARGEST_EVENT} bytes")
        return events

    def rest(self) -> bytes:
        """The event that the stream left unfinished."""
        rest = bytes(self._held)
        self._held.clear()
        return rest
