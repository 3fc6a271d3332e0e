"""Failures of a user's own policy: one line in the log, and an error response, instead of a traceback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from libra.route.custom import PolicyError
from libra.serve.answers import Handler, RefusedRequest

_LOG = logging.getLogger(__name__)


@contextmanager
def told_policy_failure() -> Iterator[None]:
    """Context for calls that only inform the policy: logs a failure and continues. The policy then lacks this
    information."""
    try:
        yield
    except PolicyError as error:
        _LOG.error("%s", error)


@web.middleware
async def answering_policy_failure(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request with status 500 if the policy fails on it; only the log shows the error."""
    try:
        return await handler(request)
    except PolicyError as error:
        _LOG.error("%s", error)
        raise RefusedRequest("the routing policy failed: see the log of the router", 500) from None
