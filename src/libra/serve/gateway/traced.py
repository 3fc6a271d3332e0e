"""Headers that trace one request through several services.

Invariant: these headers pass to the engine unchanged, except that `Via` also names this gateway. The answer has the
engine's `X-Request-Id`, or if that is missing, the client's.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from libra.serve.answers import RefusedRequest
from libra.serve.gateway.loops import MARK, VIA

REQUEST_ID = "X-Request-Id"
_FOLLOWING = (REQUEST_ID, "traceparent", "tracestate")


def sendable(name: str, value: str) -> str:
    """Check the value of a client's header. Raises `RefusedRequest` if it cannot be sent."""
    if not (value.isascii() and value.isprintable()):
        raise RefusedRequest(f"the header {name} must have only printable ASCII characters", 400)
    return value


def passed_on(request: web.Request) -> dict[str, str]:
    """Headers for the engine. Raises `RefusedRequest` if one cannot be sent."""
    given = request.headers
    passed = {name: sendable(name, given[name]) for name in _FOLLOWING if name in given}
    if VIA in given:
        passed[VIA] = f"{sendable(VIA, given[VIA])}, {request.app[MARK]}"
    return passed


def passed_back(answer: Mapping[str, str], request: web.Request) -> dict[str, str]:
    """Headers for the client, from the engine's answer and the request."""
    said = ((name, answer.get(name, "")) for name in _FOLLOWING)
    back = {name: value for name, value in said if value and value.isascii() and value.isprintable()}
    if REQUEST_ID not in back and (own := request.headers.get(REQUEST_ID)) is not None:
        back[REQUEST_ID] = own
    return back
