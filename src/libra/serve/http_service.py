"""Serving an HTTP application until it is interrupted, with thousands of requests in flight.

Invariants: the address is announced once it answers, and at shutdown pending requests end within a second. A connection
that sends no request, or reads nothing of its response, is closed in time. The garbage collector runs only after
`_CONNECTIONS` new connections, and only if the process has grown by what so many leave. It visits every object of every
request in flight, and Python would run it whenever their number grows, although nothing of a request is garbage: the
only reference cycles are those of closed transports, before Python 3.12.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_BACKLOG = 4096  # connections waiting to be accepted
_SHUTDOWN_SECONDS = 1.0  # for requests in flight
_IDLE_SECONDS = 75.0  # that a connection may go without a complete request
_STALLED_SECONDS = 60.0  # that a client may read nothing of its response
_CONNECTIONS = 100_000  # between two garbage collections
_LEFT = 5  # objects that a closed connection leaves, at least; together 1 kB
_COLLECT_SECONDS = 1.0  # between two checks whether to collect


@dataclass(slots=True)
class Connections:
    """Connections of a process, in both directions."""

    made: int = 0  # since the last collection


CONNECTIONS = web.AppKey("connections", Connections)  # set while an application is served


class _MalformedRequests(logging.Filter):
    """Reduces a malformed request, for which aiohttp logs a traceback as for a bug of the application, to a debug line.
    The sender gets status 400."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            _LOG.debug("%s: %s", record.getMessage(), type(error).__name__)  # the text may hold a secret
            return False
        return True


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_MalformedRequests())


@asynccontextmanager
async def serving(application: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """Yields the address; port 0 takes any free port. Raises OSError, with host and port, if it cannot listen."""
    connections = application[CONNECTIONS] = Connections()
    runner = web.AppRunner(
        application,
        handler_cancellation=True,
        access_log=None,
        logger=_LOG,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        keepalive_timeout=_IDLE_SECONDS,
    )
    await runner.setup()
    protocol = runner.server
    assert protocol is not None  # after setup

    def accepted() -> asyncio.BaseProtocol:
        connections.made += 1
        return protocol()

    try:
        try:
            listening = await asyncio.get_running_loop().create_server(accepted, host, port, backlog=_BACKLOG)
        except OSError as error:
            why = (error.strerror or str(error)).rpartition(": ")[2]
            raise OSError(error.errno, why, f"{host}:{port}") from None
        for each in listening.sockets:  # accepted sockets inherit it
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * _STALLED_SECONDS))
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{listening.sockets[0].getsockname()[1]}"
        finally:
            listening.close()
    finally:
        await runner.cleanup()


async def serve(application: web.Application, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM, and call `announce` with the address. Raises the limit of open files to the hard
    limit. Raises OSError if it cannot listen."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving(application, host, port) as base, collecting_rarely(application[CONNECTIONS]):
        announce(base)
        await ended.wait()


@asynccontextmanager
async def collecting_rarely(connections: Connections) -> AsyncIterator[None]:
    """Collect only as the module says, and never visit the objects that exist now."""
    gc.collect()
    gc.freeze()
    gc.disable()
    task = asyncio.create_task(_collect(connections))
    try:
        yield
    finally:
        task.cancel()
        gc.enable()
        gc.unfreeze()


async def _collect(connections: Connections) -> None:
    while True:
        await asyncio.sleep(_COLLECT_SECONDS)
        grown, _, _ = gc.get_count()  # allocated less freed since the last collection, also where it is disabled
        if connections.made >= _CONNECTIONS and grown >= _LEFT * _CONNECTIONS:
            gc.collect()
            connections.made = 0
