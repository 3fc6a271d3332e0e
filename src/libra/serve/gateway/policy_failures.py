"""Failures of a policy of the user's own: one line in the log, and an answer, instead of a traceback."""

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
    """Continue after a failed call that only informs the policy. The policy then lacks this information."""
    try:
        yield
    except PolicyError as error:
        _LOG.error("%s", error)


@web.middleware
async def answering_policy_failure(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a request with status 500 if the policy fails on it; only the log has the error."""
    try:
        return await handler(request)
    except PolicyError as error:
        _LOG.error("%s", error)
        raise RefusedRequest("the routing policy failed: see the log of the router", 500) from None
