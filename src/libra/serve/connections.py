"""Connections of a process that serves HTTP.

Invariant: a listener never has more connections than its limits and the limit of open files allow. At the limit, a new
connection replaces the longest idle one. If none is idle, the new connection gets status 503 and is closed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from aiohttp import AddrInfoType, web
from aiohttp.http_exceptions import LineTooLong

from libra.config.listeners import HttpLimits
from libra.serve.answers import refused

_KEPT_FILES = 128  # file descriptors reserved for everything except connections
_REFUSED = 64  # refused connections that are open at a time
_REFUSED_SECONDS = 1.0  # in which a refused client may finish sending its request
_BODY = b'{"error":{"message":"too many connections: try again","type":"service_unavailable","param":null,"code":503}}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_ACCEPT_FAILED = "socket.accept() out of system resource"  # asyncio's message
_TOLD_SECONDS = 60.0  # between two log lines about failed accepts


def within_open_files(limits: HttpLimits) -> HttpLimits:
    """`limits` with at most as many connections as the limit of open files permits."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits
    room = max(1, soft - _KEPT_FILES) // limits.descriptors
    return replace(limits, connections=max(1, min(limits.connections, room)))


@dataclass(slots=True, eq=False)
class Connections:
    """Connections of a process, in both directions, and the bytes of the bodies in flight."""

    limits: HttpLimits
    made: int = 0  # connections since the last garbage collection
    body_bytes: int = 0  # of bodies in flight
    idle: dict[web.RequestHandler, None] = field(default_factory=dict)  # longest idle first
    busy: dict[web.RequestHandler, int] = field(default_factory=dict)  # with a request in flight: bytes of its body
    refused: int = 0  # connections that are being refused

    @property
    def open(self) -> int:
        """Number of connections from clients."""
        return len(self.idle) + len(self.busy)

    def socket(self, address: AddrInfoType) -> socket.socket:
        """Make and count the socket of an outgoing connection. A `TraceConfig` would slow down every request."""
        self.made += 1
        family, kind, protocol, _, _ = address
        return socket.socket(family, kind, protocol)

    def admit(self) -> bool:
        """Make room for an accepted connection. Returns False if there is no room."""
        self.made += 1
        if self.open < self.limits.connections:
            return True
        if not self.idle:
            return False
        longest = next(iter(self.idle))
        del self.idle[longest]
        if longest.transport is not None:
            longest.transport.abort()
        return True

    def begin(self, connection: web.RequestHandler) -> None:
        """Mark the connection as busy with a request."""
        self.idle.pop(connection, None)
        self.busy[connection] = 0

    def hold(self, connection: web.RequestHandler, count: int) -> bool:
        """Add `count` bytes to the body of the connection's request in flight. Returns False if all bodies would then
        exceed their limit."""
        if self.body_bytes + count > self.limits.bodies_bytes:
            return False
        self.body_bytes += count
        self.busy[connection] += count
        return True

    def end(self, connection: web.RequestHandler) -> None:
        """Mark the connection as idle, since its request has ended."""
        self.body_bytes -= self.busy.pop(connection)
        if connection.transport is not None:  # otherwise the connection was lost
            self.idle[connection] = None


CONNECTIONS = web.AppKey("connections", Connections)  # set while an application is served


class Connection(web.RequestHandler):
    """A connection that `Connections` has admitted."""

    __slots__ = ("_connections",)

    def __init__(self, connections: Connections, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._connections = connections
        connections.idle[self] = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self not in self._connections.idle:  # a later connection replaced this one before it had a transport
            cast(asyncio.Transport, transport).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.idle.pop(self, None)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to a malformed request, in OpenAI's shape. aiohttp's own message quotes the request, which may
        contain a token."""
        super().handle_error(request, status, exc, None)
        if isinstance(exc, LineTooLong):
            said = "a line of the request's head is too long: send shorter headers"
        elif status < 500:
            said = f"the request is malformed ({type(exc).__name__})"
        else:
            said = "the server has failed: see its log"
        response = refused(said, status)
        response.force_close()
        return response


class RefusedConnection(asyncio.Protocol):
    """Answers with status 503 at once. The connection closes after the client has sent its request, or after
    `_REFUSED_SECONDS`.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        self._connections.refused += 1
        transport.write(_BUSY)
        if self._connections.refused > _REFUSED:
            transport.close()
        else:
            self._end = asyncio.get_running_loop().call_later(_REFUSED_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        self._transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.refused -= 1
        if self._end is not None:
            self._end.cancel()


@contextmanager
def told_once(log: logging.Logger) -> Iterator[None]:
    """Context in which running out of file descriptors logs one line a minute, not asyncio's traceback per
    connection."""
    loop = asyncio.get_running_loop()
    before, told = loop.get_exception_handler(), -_TOLD_SECONDS

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told
        if context.get("message") != _ACCEPT_FAILED:
            (before or type(loop).default_exception_handler)(loop, context)
        elif loop.time() >= told + _TOLD_SECONDS:
            told = loop.time()
            log.warning("connections wait: %s; raise the limit of open files (ulimit -n)", context.get("exception"))

    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(before)
