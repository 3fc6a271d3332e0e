"""HTTP as the gateway and emulated engines serve it, with thousands of requests in flight, until it is interrupted.

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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import AddrInfoType, web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_BACKLOG = 4096  # connections waiting to be accepted
_SHUTDOWN_SECONDS = 1.0  # for requests in flight
_IDLE_SECONDS = 75.0  # that a connection may go without a complete request
_STALLED_SECONDS = 60.0  # that a client may read nothing of its response
_CONNECTIONS = 100_000  # between two garbage collections
_LEFT = 5  # objects that a closed connection leaves, at least; together 1 kB
_COLLECT_SECONDS = 1.0  # between two checks whether to collect
_BODY_SECONDS = 60.0  # for a request body to arrive
_KINDS = {401: "authentication_error", 404: "not_found_error", 503: "service_unavailable", 504: "timeout"}

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Connections:
    """Connections of a process, in both directions."""

    made: int = 0  # since the last collection

    def socket(self, address: AddrInfoType) -> socket.socket:
        """Of a connection that is made from here: a `TraceConfig` would slow every request down."""
        self.made += 1
        family, kind, protocol, _, _ = address
        return socket.socket(family, kind, protocol)


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


# Requests that may be malformed, and errors in the shape of OpenAI's API


def refusal(message: str, status: int) -> bytes:
    """The JSON body. Statuses without a type of their own are invalid requests."""
    kind = _KINDS.get(status, "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def refused(message: str, status: int, headers: Mapping[str, str] | None = None) -> web.Response:
    body = refusal(message, status)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


class RefusedRequest(Exception):  # noqa: N818 - an answer rather than an error
    """Ends a handler with `refused(message, status, headers)`."""

    def __init__(self, message: str, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.headers = message, status, headers


@web.middleware
async def in_openai_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives every error response, aiohttp's own included, OpenAI's shape."""
    try:
        return await handler(request)
    except RefusedRequest as error:
        response = refused(error.message, error.status, error.headers)
    except web.HTTPException as error:
        kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        response = refused(f"{error.text or error.reason}", error.status, kept)
    if not request.content.is_eof() or request.content.exception() is not None:
        response.force_close()  # the rest of the body must not be read as a request
    return response


async def body_of(request: web.Request) -> bytes:
    """The whole body, decompressed. Raises `RefusedRequest` if it is damaged or arrives too slowly."""
    try:
        if request.content.is_eof():  # it has arrived
            return await request.read()
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise RefusedRequest(f"the body did not arrive within {_BODY_SECONDS:g} s", 408) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise RefusedRequest(f"the body cannot be read ({type(error).__name__}): send it whole", 400) from None


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises ValueError in one line that names the field."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


# Metrics


@dataclass(slots=True, eq=False)
class _Families(Collector):
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def metrics_response(families: Iterable[Metric]) -> web.Response:
    """The answer to Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
