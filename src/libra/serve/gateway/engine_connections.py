"""Connections to engines that carry turns, over HTTP/1.1.

The gateway spends most of its time on forwarding turns, so this client is cheap. It sends only one kind of request, and
wakes its task at most once per read of the socket.

Invariant: a connection carries one turn at a time, and is used again only after the whole answer. The client buffers up
to `_UNREAD` bytes from an engine, and then does not read the socket until the buffer has been taken.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Self, cast

import httptools
from multidict import CIMultiDict
from yarl import URL

from libra.serve.connections import Connections

KEEPALIVE_SECONDS = 4.0  # for an idle connection; vLLM closes it after 5 s, which would lose a turn sent then
CONNECT_SECONDS = 5.0  # until an engine accepts a connection
_HEAD_BYTES = 64 * 2**10  # largest head of an answer
_UNREAD = 2**18  # bytes of an answer that are buffered
_JOINED = 2**16  # bytes of the largest body that is sent in one piece with its head


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The parts of a server's address that determine a connection."""

    host: str
    port: int
    secure: bool


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Parts of an engine's URL."""

    endpoint: Endpoint
    host: str  # value of the Host header
    path: str  # without a slash at the end

    @classmethod
    def of(cls, root: str) -> Self:
        """Parse `root`, a URL with a scheme and a host."""
        url = URL(root)
        assert url.raw_host is not None and url.port is not None
        host = f"[{url.raw_host}]" if ":" in url.raw_host else url.raw_host
        named = host if url.is_default_port() else f"{host}:{url.port}"
        return cls(Endpoint(url.raw_host, url.port, url.scheme == "https"), named, url.raw_path.rstrip("/"))


class EngineConnections:
    """A pool of connections. Call `post` for each turn. `made` counts new connections in its own `made`."""

    def __init__(self, made: Connections) -> None:
        self._made = made
        self._idle: dict[Endpoint, deque[EngineConnection]] = {}  # by endpoint; the longest idle connection is first

    async def post(
        self, address: EngineAddress, path: str, headers: Mapping[str, str], body: bytes
    ) -> EngineConnection:
        """Send a request, and wait for the head of the answer. Use the returned connection as an async context. An
        engine may close an idle connection. If the connection is therefore lost before the first byte of an answer, the
        request is sent again on a new connection. Raises `OSError` if the engine accepts no connection or loses it.
        Raises `ValueError` for headers that cannot be sent, and for an answer that is not HTTP.
        """
        path, headers = address.path + path, {"Host": address.host, **headers}
        idle = self._usable(address.endpoint)
        if idle is not None:
            try:
                return await idle.post(path, headers, body)
            except OSError:
                if idle.heard:
                    raise
        return await (await self._new(address.endpoint)).post(path, headers, body)

    def _usable(self, endpoint: Endpoint) -> EngineConnection | None:
        idle = self._idle.get(endpoint)
        while idle:
            connection = idle.pop()
            if connection.usable():
                return connection
        return None

    async def _new(self, endpoint: Endpoint) -> EngineConnection:
        self._made.made += 1
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: EngineConnection(self._idle.setdefault(endpoint, deque())),
                    endpoint.host,
                    endpoint.port,
                    ssl=_trusted() if endpoint.secure else None,
                )
        except TimeoutError:
            raise ConnectionError(f"it accepted no connection in {CONNECT_SECONDS:g} s") from None
        return connection

    async def keep_closing(self) -> None:
        """Close connections that have been idle for too long, until cancelled."""
        while True:
            await asyncio.sleep(KEEPALIVE_SECONDS / 2)
            for idle in self._idle.values():
                while idle and not idle[0].usable():
                    idle.popleft()

    def close(self) -> None:
        """Close all idle connections."""
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()


class EngineConnection(asyncio.Protocol):
    """A connection to an engine. `status` and `headers` are those of the answer to the latest `post`."""

    def __init__(self, idle: deque[EngineConnection]) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self._idle, self._idle_since = idle, 0.0
        self._transport: asyncio.Transport
        self._open = False
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []  # of the body, not yet taken
        self._taker: Callable[[bytes], bool] | None = None  # called with pieces as they arrive
        self._unread = self._head_bytes = 0
        self.heard = False  # whether a byte of an answer has arrived
        self._headed = self._ended = True  # whether the head, and the whole answer, have arrived
        self._reusable = True
        self._paused = False  # whether reading from the socket is paused
        self._lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> Self:
        """Send a request, and wait for the head of the answer. On failure, close the connection and raise the errors of
        `EngineConnections.post`."""
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}\r\n\r\n"])
        self.headers = CIMultiDict()
        self._head_bytes, self._taker = 0, None
        self.heard = self._headed = self._ended = self._reusable = False
        try:
            if head.count("\n") != len(lines) + 2 or head.count("\r") != len(lines) + 2:
                raise ValueError("a header has more than one line")
            if not self._open:
                await self._more()  # raises the reason
            self._transport.write(head.encode() + body if len(body) <= _JOINED else head.encode())
            if len(body) > _JOINED:
                self._transport.write(body)
            while not self._headed:
                await self._more()
        except BaseException:
            self.abort()
            raise
        return self

    @property
    def content_type(self) -> str:
        """Content type of the answer, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def readany(self, at_once: Callable[[bytes], bool] | None = None) -> bytes:
        """Bytes of the body that have arrived since the last call, at least one; b"" at the end. Waits for them if
        needed. Bytes that arrive during the wait go to `at_once` first; if it returns True, they are not returned here.
        Raises the errors of `post`."""
        while not (pieces := self._pieces):
            if self._ended:
                return b""
            self._taker = at_once
            await self._more()
        self._pieces, self._unread = [], 0
        if self._paused and self._open:
            self._paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _more(self) -> asyncio.Future[None]:
        """A future that is done once bytes or the end have arrived. Raises `OSError` or `ValueError` if the answer
        failed."""
        if self._lost is not None:
            raise self._lost
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def usable(self) -> bool:
        """Whether an idle connection may carry a turn. Closes the connection if not."""
        if self._open and not self._transport.is_closing() and self._loop.time() < self._idle_since + KEEPALIVE_SECONDS:
            return True
        self.abort()
        return False

    def abort(self) -> None:
        if self._open:
            self._transport.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended and self._reusable and not self._pieces and self._lost is None:
            self._idle_since = self._loop.time()
            self._idle.append(self)
        else:
            self.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open = True

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            self._lose(ValueError(f"an answer that is no HTTP ({error.__context__ or error})"))
        if not self._headed:
            self._head_bytes += len(data)  # bytes of an unfinished header line
            if self._head_bytes > _HEAD_BYTES:
                self._lose(ValueError("an answer whose head is too long"))
        self._wake()
        if self._unread > _UNREAD and not self._paused and self._open:  # no taker took the bytes
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._headed and not self._ended and exc is None and self._lost is None and self._until_closed():
            self._ended = True
        elif self._lost is None:
            self._lost = exc or ConnectionResetError("it closed the connection")
        self._open = self._reusable = False
        del self._parser, self._transport  # they refer to this connection
        self._wake()

    def _lose(self, error: ValueError) -> None:
        self._lost = error
        self.abort()

    def _until_closed(self) -> bool:
        """Whether the end of the connection is the end of the answer (RFC 9112, 6.3)."""
        return "Content-Length" not in self.headers and "Transfer-Encoding" not in self.headers

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done() or not (self._headed or self._lost is not None):
            return
        if self._taker is not None and self._pieces and self._taker(b"".join(self._pieces)):
            self._pieces, self._unread = [], 0
            if not self._ended and self._lost is None:
                return
        self._waiter = None
        waiter.set_result(None)

    # Called by httptools

    def on_message_begin(self) -> None:
        if self._ended:
            raise ValueError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _HEAD_BYTES:
            raise ValueError("an answer whose head is too long")
        self.headers.add(name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 100:
            raise ValueError(f"status {self.status}")
        if self.status < 200:
            self.headers.clear()  # an interim response: the real one follows
        else:
            self._headed = True

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._unread += len(piece)

    def on_message_complete(self) -> None:
        if self._headed:
            self._ended, self._reusable = True, self._parser.should_keep_alive()


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()
