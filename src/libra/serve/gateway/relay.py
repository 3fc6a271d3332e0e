"""One turn on one engine: forwards the body, and passes the answer back unchanged.

Invariant: if the engine fails before the first byte of its answer has reached the client, no response is returned, and
the caller may retry on another engine. A later failure becomes an error event at the end of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from libra.serve.answers import refusal, refused
from libra.serve.gateway.engine_connections import EngineConnection, EngineConnections
from libra.serve.gateway.event_stream import EVENT_STREAM, EventStream
from libra.serve.gateway.said import Said
from libra.serve.gateway.traced import passed_back
from libra.serve.gateway.upstreams import Attempt, Fault, TurnFailure, untraced
from libra.serve.gateway.usage import AnswerReader, Usage

_FAULTS = {  # by status of an engine's answer
    429: Fault.BUSY,
    500: Fault.ERROR,
    502: Fault.GONE,
    503: Fault.BUSY,
    504: Fault.GONE,
    508: Fault.GONE,  # the engine is a gateway that sends turns back to this one
}
_LATEST = 4  # last events of a stream that are searched for its end
_AT_ONCE = 2**15  # bytes; less than a connection buffers before a writer must wait
_LARGEST_ANSWER = 256 * 2**20  # bytes of an answer that is not streamed
_SENT = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # the gateway reads the answer
_PASSED = ("Content-Type", "Content-Encoding", "Retry-After", "Server-Timing")  # headers passed back to the client


@dataclass(frozen=True, slots=True)
class Relayed:
    """The result of a turn on one engine."""

    response: web.StreamResponse | None  # to the client; None: the client has received nothing, and a retry is possible
    usage: Usage | None = None  # None: no answer, or the engine did not report tokens
    failure: TurnFailure | None = None  # possibly in the middle of a stream
    said: Said | None = None  # contents of the answer, if the reader collects them


async def relay(
    connections: EngineConnections,
    request: web.Request,
    path: str,
    headers: Mapping[str, str],
    attempt: Attempt,
    body: bytes,
    reader: AnswerReader,
    *,
    stream: bool,
) -> Relayed:
    """Send `body` to a path of the engine; `reader` reads the answer. `headers` are sent in addition to those of every
    turn."""
    engine = attempt.engine
    address = engine.address
    response: web.StreamResponse | None = None
    try:
        async with attempt, await connections.post(address, path, {**_SENT, **headers}, body) as answer:
            if stream and answer.status == 200 and answer.content_type == EVENT_STREAM:
                response = web.StreamResponse(
                    headers={
                        "Content-Type": EVENT_STREAM,
                        "Cache-Control": "no-cache",
                        **passed_back(answer.headers, request),
                    }
                )
                usage = await _stream(request, response, attempt, answer, reader)
                return Relayed(response, usage, said=reader.said)
            return await _whole(request, attempt, answer, reader)
    except (OSError, ValueError) as error:  # ValueError: the answer is not HTTP
        untraced(error)
        why = str(error) or type(error).__name__
        if isinstance(error, ValueError):  # the turn may cause it, and one turn must not stop every engine
            failed = TurnFailure(f"the answer of engine {engine.id} is invalid: {why}", Fault.ERROR)
        else:
            failed = TurnFailure(f"engine {engine.id} was lost: {why}", Fault.GONE)
    failure = attempt.failure or failed
    if response is not None and response.prepared:
        said = refusal(f"{failure.message}; send it again with the tokens received so far", 503)
        await _write(response, request, b"data: " + said + b"\n\n")
        return Relayed(response, failure=failure)
    return Relayed(refused(failure.message, 504) if failure.fault is Fault.SILENT else None, failure=failure)


async def _whole(request: web.Request, attempt: Attempt, answer: EngineConnection, reader: AnswerReader) -> Relayed:
    engine, pieces, size = attempt.engine, [], 0
    while piece := await answer.readany():
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
    headers |= passed_back(answer.headers, request)
    response = web.Response(body=whole, status=answer.status, headers=headers)
    fault = _FAULTS.get(answer.status)
    if fault is not None:
        message = f"engine {engine.id} answered with status {answer.status}"
        return Relayed(None, failure=TurnFailure(message, fault, response))
    if answer.status == 200:
        reader.whole(whole)
    engine.turns += reader.usage is not None
    return Relayed(response, reader.usage, said=reader.said)


async def _stream(
    request: web.Request, response: web.StreamResponse, attempt: Attempt, answer: EngineConnection, reader: AnswerReader
) -> Usage | None:
    """Pass each event on when it ends. Returns None if the client has left, or the engine reported no usage."""
    passing = _Passing(request, response, attempt, reader)
    try:
        while piece := await answer.readany(passing.at_once):
            passed = passing.cut(piece)
            if passed and not await _write(response, request, passed):  # a retry is possible before the first write
                return None
    except OSError:
        if not passing.complete():
            raise
        # The client has the whole answer: only the end of the HTTP message is missing.
    rest = passing.rest()
    if not passing.complete():
        raise ValueError("the stream ended early")
    attempt.engine.turns += reader.usage is not None
    if rest:
        await _write(response, request, rest)
    return reader.usage


class _Passing:
    """Passes the events of an answer on to the client."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, attempt: Attempt, reader: AnswerReader
    ) -> None:
        self._latest: deque[bytes] = deque(maxlen=_LATEST)  # the last events
        self._request, self._response, self._attempt, self._reader = request, response, attempt, reader
        self._events = EventStream()

    def cut(self, piece: bytes) -> bytes:
        """The events for the client that this piece of the stream completes. Raises `ValueError` for an event above the
        size limit."""
        self._attempt.touch()
        events = self._events.feed(piece)
        if not events:
            return b""
        self._latest.extend(events)
        if len(events) == 1:
            return events[0] if self._reader.event(events[0]) else b""
        return b"".join([event for event in events if self._reader.event(event)])

    def complete(self) -> bool:
        """Whether one of the last events ends the stream. Keep-alives, for example, may follow its last event."""
        return self._reader.ended(b"".join(self._latest))

    def rest(self) -> bytes:
        """The bytes of an event that the stream did not complete."""
        if rest := self._events.rest():
            self._latest.append(rest)
            self._reader.event(rest)
        return rest

    def at_once(self, piece: bytes) -> bool:
        """Pass a small piece on at once if the client keeps up, which saves a wake-up of the turn's task. Returns False
        if the task must take the piece."""
        transport = self._request.transport
        if len(piece) > _AT_ONCE or self._events.unfinished or not self._response.prepared:
            return False
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        if passed := self.cut(piece):
            _without_waiting(self._response.write(passed))
        return True


def _without_waiting(writing: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits."""
    try:
        writing.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


async def _write(response: web.StreamResponse, request: web.Request, data: bytes) -> bool:
    """Write to the client. Returns False if the client has left."""
    try:
        if not response.prepared:
            await response.prepare(request)
        await response.write(data)
    except ConnectionError:
        return False
    return True
