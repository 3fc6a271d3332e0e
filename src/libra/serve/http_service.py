"""An HTTP application that listens until it is interrupted, and holds thousands of requests for long.

Invariants: it answers by the time that its address is known, and when it ends those who wait are told within a second.
A connection that says nothing, or takes nothing of its answer, is closed in time. There is a garbage collection when
`_CONNECTIONS` were made since the one before and the process has grown by what so many leave, and no other: everybody
waits while it looks at every object of every request. Python's own would come with the turnover of the requests, or by
growth alone with how many of them wait, though nothing of either is garbage. Of what these servers make only the
transport of a connection refers to itself, and of those only ones that have ended, before Python 3.12.
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

_BACKLOG = 4096  # connections that wait to be accepted
_SHUTDOWN = 1.0  # seconds for those who are being answered
_IDLE_SECONDS = 75.0  # of a connection without a whole request
_STALLED_SECONDS = 60.0  # of one that takes nothing of what it is sent
_CONNECTIONS = 100_000  # between two garbage collections
_LEFT = 5  # objects that one leaves, or more, of 1 kB together
_LOOK_SECONDS = 1.0


@dataclass(slots=True)
class Connections:
    """Of a process, to its clients and to others."""

    made: int = 0  # since the last collection


CONNECTIONS = web.AppKey("connections", Connections)  # that its process has made, while an application is served


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


@asynccontextmanager
async def serving(application: web.Application, host: str, port: int) -> AsyncIterator[str]:
    """The address that it answers at; port 0 asks for any that is free. Raises OSError where it cannot listen."""
    connections = application[CONNECTIONS] = Connections()
    runner = web.AppRunner(
        application,
        handler_cancellation=True,
        access_log=None,
        logger=_LOG,
        shutdown_timeout=_SHUTDOWN,
        keepalive_timeout=_IDLE_SECONDS,
    )
    await runner.setup()
    protocol = runner.server
    assert protocol is not None  # of one that is set up

    def accepted() -> asyncio.BaseProtocol:
        connections.made += 1
        return protocol()

    try:
        try:
            listening = await asyncio.get_running_loop().create_server(accepted, host, port, backlog=_BACKLOG)
        except OSError as error:
            why = (error.strerror or str(error)).rpartition(": ")[2]
            raise OSError(error.errno, f"cannot listen on {host}, port {port}: {why}") from None
        for each in listening.sockets:  # what it accepts has it from there
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * _STALLED_SECONDS))
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


@asynccontextmanager
async def collecting_rarely(connections: Connections) -> AsyncIterator[None]:
    """While it lasts, only connections lead to a collection, and what was there before is not looked at again."""
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
        await asyncio.sleep(_LOOK_SECONDS)
        grown, _, _ = gc.get_count()  # allocated less freed since the last collection, also where it is disabled
        if connections.made >= _CONNECTIONS and grown >= _LEFT * _CONNECTIONS:
            gc.collect()
            connections.made = 0
