"""HTTP servers of the gateway, emulated engines and metrics, with thousands of requests in flight.

Invariants: the address is announced only after the server answers there. At shutdown, pending requests end within a
second. A connection that sends no request, or reads nothing of its response, is closed in time. The garbage collector
runs only after `_CONNECTIONS` new connections, and only if the process has grown by their garbage. It also runs after a
rush, when few connections are left, and then free memory is returned to the system. It visits every object of every
request in flight, and Python would run it whenever their number grows. Yet requests leave no garbage: the only
reference cycles are those of closed transports of asyncio itself, before Python 3.12.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from libra.config.listeners import EMULATOR, HttpLimits
from libra.serve.answers import Handler, in_openai_shape
from libra.serve.connections import (
    CONNECTIONS,
    Connection,
    Connections,
    RefusedConnection,
    told_once,
    within_open_files,
)
from libra.serve.guard import Guard

_BACKLOG = 4096  # connections waiting to be accepted
_ACCEPTED = 64  # connections between two turns of the event loop, at most
_TURNS = 8  # of the event loop until the request of an accepted connection is read, at most
_SHUTDOWN_SECONDS = 1.0  # for requests in flight
_CONNECTIONS = 100_000  # between two garbage collections
_LEFT = 5  # objects that a closed connection leaves, at least; together 1 kB
_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 2**19  # of malloc.h; bytes, more than asyncio reads from a socket at a time
_COLLECT_SECONDS = 1.0  # between two checks whether to collect
_MANY, _QUIET = 256, 0.1  # connections, and the share of them at which a rush is over


class _MalformedRequests(logging.Filter):
    """Logs a malformed request as a debug line instead of aiohttp's traceback, which looks like a bug of the
    application. The sender gets status 400."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            _LOG.debug("%s: %s", record.getMessage(), type(error).__name__)  # the text may hold a secret
            return False
        return True


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_MalformedRequests())


@asynccontextmanager
async def serving(
    application: web.Application, host: str, port: int, limits: HttpLimits = EMULATOR, token: str | None = None
) -> AsyncIterator[str]:
    """Yields the address of a server; port 0 means any free port. Clients must send the bearer token `token`. Raises
    OSError with host and port if the server cannot listen. Raises ValueError if other machines can reach the host and
    there is no token.
    """
    guard = Guard(host, token)
    limits = within_open_files(limits)
    connections = application[CONNECTIONS] = Connections(limits)

    @web.middleware
    async def attended(request: web.Request, handler: Handler) -> web.StreamResponse:
        connections.begin(request.protocol)
        try:
            guard.check(request)
            return await handler(request)
        finally:
            connections.end(request.protocol)

    application.middlewares[:0] = [in_openai_shape, attended]
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS)
    options = {
        "access_log": None,
        "logger": _LOG,
        "keepalive_timeout": limits.idle_seconds,
        "auto_decompress": False,  # before its limits are known
    }

    def accepted() -> asyncio.BaseProtocol:
        if connections.admit():
            assert runner.server is not None  # after setup
            return Connection(connections, runner.server, **options)
        return RefusedConnection(connections)

    try:
        await runner.setup()
        with told_once(_LOG):
            try:
                # As few as leave each one time to be read before it can be the longest idle of all.
                together = max(1, min(_ACCEPTED, limits.connections // _TURNS))
                listening = await asyncio.get_running_loop().create_server(accepted, host, port, backlog=together)
            except OSError as error:
                why = (error.strerror or str(error)).rpartition(": ")[2]
                raise OSError(error.errno, why, f"{host}:{port}") from None
            for each in listening.sockets:
                with each.dup() as same:
                    same.listen(_BACKLOG)
                if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit it
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * limits.stalled_seconds))
            try:
                yield f"http://{f'[{host}]' if ':' in host else host}:{listening.sockets[0].getsockname()[1]}"
            finally:
                listening.close()
    finally:
        await runner.cleanup()


def run(main: Coroutine[Any, Any, None]) -> None:
    """Like `asyncio.run`, on uvloop, whose closed transports leave no garbage."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def serve(
    application: web.Application,
    host: str,
    port: int,
    announce: Callable[[str], None],
    limits: HttpLimits = EMULATOR,
    token: str | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM, and call `announce` with the address. Increases the limit of open files to the
    hard limit. Raises OSError if it cannot listen.
    """
    _return_large_blocks()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with (
        serving(application, host, port, limits, token) as base,
        collecting_rarely(application[CONNECTIONS]),
    ):
        announce(base)
        await ended.wait()


def _return_large_blocks() -> None:
    """Return the memory of large bodies to the system after their use: glibc would raise this threshold with each of
    them, and then keep them in its heap. Does nothing with another C library."""
    _glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BLOCK)


@asynccontextmanager
async def collecting_rarely(connections: Connections) -> AsyncIterator[None]:
    """Collect only as the module describes, and never visit the present objects."""
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
    most = 0  # connections at a time since the last collection
    while True:
        await asyncio.sleep(_COLLECT_SECONDS)
        grown, _, _ = gc.get_count()  # allocated less freed since the last collection, also where it is disabled
        much = connections.made >= _CONNECTIONS and grown >= _LEFT * _CONNECTIONS
        most = max(most, connections.open)
        quiet = most >= _MANY and connections.open <= _QUIET * most
        if much or quiet:
            gc.collect()
            connections.made = 0
        if quiet:
            _glibc("malloc_trim", 0)  # returns free memory to the system
            most = connections.open


def _glibc(function: str, *arguments: int) -> None:
    """Call a function of glibc's allocator. Does nothing with another C library."""
    found = getattr(ctypes.CDLL(None), function, None)
    if found is not None:
        found(*arguments)
