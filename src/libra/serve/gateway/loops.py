"""Detection of requests that a gateway sends to itself, through an engine that is also a gateway.

Invariant: each request to an engine has this gateway's mark in `Via`, after the marks of earlier gateways. A request
that arrives with the mark is refused with status 508, so no turn and no health check runs in a circle.
"""

from __future__ import annotations

import secrets

from aiohttp import web
from aiohttp.typedefs import Handler

from libra.serve.answers import RefusedRequest

VIA = "Via"
MARK = web.AppKey("mark of this gateway in Via", str)


def new_mark() -> str:
    """A random value of `Via` (RFC 9110, 7.6.3) that identifies this gateway."""
    return f"1.1 libra-{secrets.token_hex(8)}"


@web.middleware
async def refusing_loops(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.app[MARK] in request.headers.get(VIA, ""):
        raise RefusedRequest("an engine of this gateway leads back to it: DELETE it from /workers", 508)
    return await handler(request)
