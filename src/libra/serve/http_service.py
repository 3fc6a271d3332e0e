"""An HTTP application that listens until it is interrupted.

Invariant: it answers by the time that its address is known, and when it ends those who wait are told within a second.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from libra.serve.rare_collection import Connections, collecting_rarely

CONNECTIONS = web.AppKey("connections", Connections)  # that its process has made, while an application is served

_KINDS = {404: "not_found_error", 503: "service_unavailable"}  # others: the request's own fault
_BACKLOG = 4096  # connections that wait to be accepted
_SHUTDOWN = 1.0  # seconds for those who are being answered


class _NotOurFault(logging.Filter):
    """aiohttp logs a request that is no HTTP with a traceback, as if it were an error of the application. Its sender is
    told so with 400; here it is worth a line to who debugs."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            _LOG.debug("%s: %s", record.getMessage(), type(error).__name__)  # what was sent may hold a secret
            return False
        return True


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_NotOurFault())


def refusal(message: str, status: int) -> bytes:
    """As OpenAI's API says what is wrong, in JSON."""
    kind = _KINDS.get(status, "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def refused(message: str, status: int) -> web.Response:
    return web.Response(body=refusal(message, status), status=status, content_type="application/json")


@asynccontextmanager
async def serving(application: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """The address that it answers at; port 0 asks for any that is free. Raises OSError where it is taken."""
    connections = application[CONNECTIONS] = Connections()
    runner = web.AppRunner(
        application, handler_cancellation=True, access_log=None, logger=_LOG, shutdown_timeout=_SHUTDOWN
    )
    await runner.setup()
    protocol = runner.server
    assert protocol is not None  # of one that is set up

    def accepted() -> asyncio.BaseProtocol:
        connections.made += 1
        return protocol()

    try:
        listening = await asyncio.get_running_loop().create_server(accepted, host, port, backlog=_BACKLOG)
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{listening.sockets[0].getsockname()[1]}"
        finally:
            listening.close()
    finally:
        await runner.cleanup()


async def serve(application: web.Application, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM; `announce` is told the address. As many files may be open as the process is allowed.
    Raises OSError where the port is taken."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving(application, host, port) as base, collecting_rarely(application[CONNECTIONS]):
        announce(base)
        await ended.wait()
