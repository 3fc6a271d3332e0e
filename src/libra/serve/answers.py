"""Responses that the HTTP listeners share: errors in the shape of OpenAI's API, and metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable",
    504: "timeout",
}

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refusal(message: str, status: int) -> bytes:
    """JSON body of an error. A status that `_KINDS` lacks is an invalid request."""
    kind = _KINDS.get(status, "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def refused(message: str, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    body = refusal(message, status)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


class RefusedRequest(Exception):  # noqa: N818 - an answer rather than an error
    """Raised by a handler to answer with `refused(message, status, headers)`."""

    def __init__(self, message: str, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.headers = message, status, headers


@web.middleware
async def in_openai_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every error response OpenAI's shape, including aiohttp's own error responses."""
    try:
        return await handler(request)
    except RefusedRequest as error:
        response = refused(error.message, error.status, error.headers)
    except web.HTTPException as error:
        kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        response = refused(f"{error.text or error.reason}", error.status, kept)
    if not request.content.is_eof() or request.content.exception() is not None:
        response.force_close()  # otherwise the rest of the body would be read as the next request
    return response


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body. Raises `ValueError` in one line that names the field."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


# Metrics


@dataclass(slots=True, eq=False)
class _Families(Collector):
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def metrics_response(families: Iterable[Metric]) -> web.Response:
    """The response to a Prometheus scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
