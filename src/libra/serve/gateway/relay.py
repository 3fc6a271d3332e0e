"""One turn on one engine: forwards the body, and passes the answer back unchanged.

Invariant: until the first byte of an answer has reached the client, a failure of the engine gives no response, and the
caller may retry on another engine. A later failure is an error event at the end of the stream.
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

_FAULTS = {  # by status of an answer
    429: Fault.BUSY,
    500: Fault.ERROR,
    502: Fault.GONE,
    503: Fault.BUSY,
    504: Fault.GONE,
    508: Fault.GONE,  # it is a gateway, and one of its engines leads back here
}
_LATEST = 4  # events of a stream in which its end is looked for
_AT_ONCE = 2**15  # bytes, less than a connection buffers before a writer has to wait
_LARGEST_ANSWER = 256 * 2**20  # bytes of one in one piece
_SENT = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # the gateway reads the answer
_PASSED = ("Content-Type", "Content-Encoding", "Retry-After", "Server-Timing")  # headers of an answer


@dataclass(frozen=True, slots=True)
class Relayed:
    """A turn that an engine served."""

    response: web.StreamResponse | None  # to the client; None: nothing has reached it, and the turn may be retried
    usage: Usage | None = None  # None: not answered, or the engine did not report it
    failure: TurnFailure | None = None  # perhaps in the middle of a stream
    said: Said | None = None  # what the engine said, where the reader collects it


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
    """Send `body` to a path of the engine; `reader` reads the answer. `headers` are added to those of every turn."""
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
    except (OSError, ValueError) as error:  # ValueError: an answer that is no HTTP
        untraced(error)
        why = str(error) or type(error).__name__
        if isinstance(error, ValueError):  # perhaps because of the turn: one turn must not stop every engine
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
    """Pass each event on when it ends. None: the client has left, or the engine reported no usage."""
    passing = _Passing(request, response, attempt, reader)
    try:
        while piece := await answer.readany(passing.at_once):
            passed = passing.cut(piece)
            if passed and not await _write(response, request, passed):  # before the first write a retry is possible
                return None
    except OSError:
        if not passing.complete():
            raise
        # Only the end of the message is missing: the client has the whole answer.
    rest = passing.rest()
    if not passing.complete():
        raise ValueError("the stream ended early")
    attempt.engine.turns += reader.usage is not None
    if rest:
        await _write(response, request, rest)
    return reader.usage


class _Passing:
    """Events of an answer on their way to the client."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, attempt: Attempt, reader: AnswerReader
    ) -> None:
        self._latest: deque[bytes] = deque(maxlen=_LATEST)  # events
        self._request, self._response, self._attempt, self._reader = request, response, attempt, reader
        self._events = EventStream()

    def cut(self, piece: bytes) -> bytes:
        """The events for the client that end in the next piece of the stream. Raises ValueError for an event that is
        too large."""
        self._attempt.touch()
        events = self._events.feed(piece)
        if not events:
            return b""
        self._latest.extend(events)
        if len(events) == 1:
            return events[0] if self._reader.event(events[0]) else b""
        return b"".join([event for event in events if self._reader.event(event)])

    def complete(self) -> bool:
        """Whether the last events end a stream. Keep-alives, for example, may follow its last event."""
        return self._reader.ended(b"".join(self._latest))

    def rest(self) -> bytes:
        """The event that the stream left unfinished."""
        if rest := self._events.rest():
            self._latest.append(rest)
            self._reader.event(rest)
        return rest

    def at_once(self, piece: bytes) -> bool:
        """Pass a small piece on at once if the client keeps up. This saves a wake-up of the turn's task. False:
        the task has to take the piece."""
        transport = self._request.transport
        if len(piece) > _AT_ONCE or self._events.unfinished or not self._response.prepared:
            return False
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        if passed := self.cut(piece):
            _without_waiting(self._response.write(passed))
        return True


def _without_waiting(writing: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that has nothing to wait for."""
    try:
        writing.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


async def _write(response: web.StreamResponse, request: web.Request, data: bytes) -> bool:
    """Write to the client. False: it has left."""
    try:
        if not response.prepared:
            await response.prepare(request)
        await response.write(data)
    except ConnectionError:
        return False
    return True
