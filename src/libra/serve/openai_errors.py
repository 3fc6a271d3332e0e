"""Error responses in the shape of OpenAI's API, and reading requests that may be malformed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_KINDS = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable", 504: "timeout"}
_BODY_SECONDS = 60.0  # for a request body to arrive

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refusal(message: str, status: int) -> bytes:
    """The JSON body. Statuses without a type of their own are invalid requests."""
    kind = _KINDS.get(status, "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def refused(message: str, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    body = refusal(message, status)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


class RefusedRequest(Exception):  # noqa: N818 - an answer rather than an error
    """Ends a handler with `refused(message, status)`."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.message, self.status = message, status


@web.middleware
async def in_openai_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every error response, aiohttp's own included, OpenAI's shape."""
    try:
        return await handler(request)
    except RefusedRequest as refusal:
        response = refused(refusal.message, refusal.status)
    except web.HTTPException as error:
        kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        response = refused(f"{error.text or error.reason}", error.status, kept)
    if not request.content.is_eof() or request.content.exception() is not None:
        response.force_close()  # the rest of the body must not be read as a request
    return response


async def body_of(request: web.Request) -> bytes:
    """The whole body, decompressed. Raises `RefusedRequest` if it is damaged or arrives too slowly."""
    try:
        if request.content.is_eof():  # it has arrived
            return await request.read()
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise RefusedRequest(f"the body did not arrive within {_BODY_SECONDS:g} s", 408) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise RefusedRequest(f"the body cannot be read ({type(error).__name__}): send it whole", 400) from None


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises ValueError in one line that names the field."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
