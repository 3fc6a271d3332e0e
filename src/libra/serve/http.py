"""HTTP servers of the gateway, emulated engines and metrics, with thousands of requests in flight.

Invariants: the address is announced only after the server answers there. At shutdown, pending requests end within a
second. A connection that sends no request, or does not read its response, is closed in time.

The garbage collector runs only after `_CONNECTIONS` new connections, and only if their garbage has made the process
grow. It also runs after a rush, when few connections are left, and free memory then returns to the system. Python's own
schedule would run it whenever the number of objects in flight grows, and each run visits all of them. Yet requests
leave no garbage: the only reference cycles are those of asyncio's closed transports before Python 3.12.
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
_TURNS = 8  # event loop turns until the request of an accepted connection is read, at most
_SHUTDOWN_SECONDS = 1.0  # in which requests in flight may end
_CONNECTIONS = 100_000  # new connections between two garbage collections
_LEFT = 5  # objects that a closed connection leaves, at least; together 1 kB
_M_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 2**19  # from malloc.h; bytes, more than asyncio reads from a socket at a time
_COLLECT_SECONDS = 1.0  # between two checks whether to collect
_MANY, _QUIET = 256, 0.1  # connections of a rush at least, and the share of them that is left at its end


class _MalformedRequests(logging.Filter):
    """Logs a malformed request as a debug line instead of aiohttp's traceback, which looks like a bug of the
    application. The sender gets status 400."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            _LOG.debug("%s: %s", record.getMessage(), type(error).__name__)  # the error's text may contain a secret
            return False
        return True


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_MalformedRequests())


@asynccontextmanager
async def serving(
    application: web.Application, host: str, port: int, limits: HttpLimits = EMULATOR, token: str | None = None
) -> AsyncIterator[str]:
    """Context with the address of a running server; port 0 means any free port. With a `token`, clients must send it as
    bearer token. Raises `OSError` with host and port if the server cannot listen, and `ValueError` if other machines
    can reach the host and `token` is None.
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
        "auto_decompress": False,  # `body_of` decompresses within the limits
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
                # So few at a time that each connection can be read before it becomes the longest idle one.
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
    """Like `asyncio.run`, but on uvloop, whose closed transports leave no garbage."""
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
    """Serve until Ctrl-C or SIGTERM, and call `announce` with the address. Raises the limit of open files to the hard
    limit. Raises `OSError` if the server cannot listen.
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
    """Have glibc return the memory of large bodies to the system after use. By default, glibc raises its threshold with
    each large body, and then keeps them in its heap. Does nothing with another C library."""
    _glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BLOCK)


@asynccontextmanager
async def collecting_rarely(connections: Connections) -> AsyncIterator[None]:
    """Context in which garbage is collected only as the module describes, and without visiting the present objects."""
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
    most = 0  # highest number of open connections since the last collection
    while True:
        await asyncio.sleep(_COLLECT_SECONDS)
        grown, _, _ = gc.get_count()  # objects allocated minus freed since the last collection
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
