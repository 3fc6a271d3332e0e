"""One turn on one engine: forwards the body, and passes the answer back unchanged.

Invariant: until the first byte of an answer has reached the client, an engine's failure is an exception, and the caller
may retry elsewhere; after that it is an error event at the end of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import ClientError, ClientResponse, ClientSession, web

from libra.serve.gateway.bodies import usage_of
from libra.serve.gateway.event_stream import EventStream, data_of
from libra.serve.gateway.upstreams import Attempt, Upstream
from libra.serve.openai_errors import RefusedRequest, refusal, refused

_GONE = {502, 503, 504}  # statuses of a server that cannot
_LARGEST_ANSWER = 256 * 2**20  # bytes of one in one piece
_SENT = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # it is read on its way
_PASSED = ("Content-Type", "Content-Encoding", "Retry-After", "Server-Timing")  # headers of an answer
_USAGE = b'"usage"'
_EVENT_STREAM = "text/event-stream"

Usage = tuple[int, int]  # tokens of the prompt, and generated


class EngineLostError(Exception):
    """The engine failed before it had answered. `answer` is its own error response, if it gave one."""

    def __init__(self, message: str, answer: web.Response | None = None) -> None:
        super().__init__(message)
        self.answer = answer


class TurnOverdueError(Exception):
    """The engine is healthy, but sends nothing of this turn."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A turn that ended with a response to the client."""

    response: web.StreamResponse
    usage: Usage | None = None  # None: not answered, or the engine did not report it
    lost: EngineLostError | None = None  # the engine failed in the middle of the stream


def authorization(engine: Upstream, request: web.Request | None) -> dict[str, str]:
    """The header with the engine's own token, or else the client's header."""
    value = engine.section.authorization()
    if value is None and request is not None:
        value = request.headers.get("Authorization")
        if value is not None and not (value.isascii() and value.isprintable()):
            raise RefusedRequest("the header Authorization holds more than printable ASCII characters", 400)
    return {} if value is None else {"Authorization": value}


async def relay(
    session: ClientSession, request: web.Request, attempt: Attempt, path: str, body: bytes, *, stream: bool, usage: bool
) -> Relayed:
    """`usage`: whether the client wants a stream's usage event. Raises `EngineLostError` or `TurnOverdueError` while
    nothing has reached the client."""
    engine = attempt.engine
    headers = _SENT | authorization(engine, request)
    response: web.StreamResponse | None = None
    failure: Exception
    try:
        async with (
            attempt,
            session.post(f"{engine.section.url}/{path}", data=body, headers=headers, allow_redirects=False) as answer,
        ):
            if stream and answer.status == 200 and answer.content_type == _EVENT_STREAM:
                response = web.StreamResponse(headers={"Content-Type": _EVENT_STREAM, "Cache-Control": "no-cache"})
                return Relayed(response, await _stream(request, response, attempt, answer, usage))
            return await _whole(attempt, answer)
    except (ClientError, OSError, ValueError) as error:  # ValueError: an answer that is no HTTP
        failure = attempt.error or EngineLostError(f"engine {engine.id} went away: {_reason(error)}")
    if response is None or not response.prepared:
        raise failure
    await _write(response, b"data: " + refusal(f"{failure}; ask again from what has come", 503) + b"\n\n")
    return Relayed(response, lost=failure if isinstance(failure, EngineLostError) else None)


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
        raise EngineLostError(f"engine {engine.id} answered with status {answer.status}", response)
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
        if passed:
            if not response.prepared and not await _began(response, request):  # up to here a retry is possible
                return None
            if not await _write(response, b"".join(passed)):
                return None
    rest = events.rest()
    if rest:
        latest, (found, _) = rest, usage_of(data_of(rest))
        usage = found or usage
    if usage is None and b"[DONE]" not in latest:
        raise ValueError("the stream ended before its end")
    attempt.engine.turns += usage is not None
    if rest and (response.prepared or await _began(response, request)):
        await _write(response, rest)
    return usage


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


async def _began(response: web.StreamResponse, request: web.Request) -> bool:
    """False: the client has gone."""
    try:
        await response.prepare(request)
    except ConnectionError:
        return False
    return True


async def _write(response: web.StreamResponse, data: bytes) -> bool:
    """False: the client has gone."""
    try:
        await response.write(data)
    except ConnectionError:
        return False
    return True
