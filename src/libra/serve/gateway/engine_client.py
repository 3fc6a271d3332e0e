"""The HTTP client of a gateway for its engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

from libra.serve.connections import Connections
from libra.serve.gateway.loops import VIA, new_mark

# Seconds of an idle connection: vLLM closes it after 5, and a request at that moment would lose its engine.
_KEEPALIVE = 4.0
_CONNECT_TIMEOUT = 5.0  # seconds until an engine accepts a connection
_UNSAID = ("Accept", "User-Agent")  # headers that aiohttp would add


class EngineClient:
    """Has a session while it runs. `mark` is in `Via` of all that it sends."""

    session: ClientSession

    def __init__(self) -> None:
        self.mark = new_mark()

    @asynccontextmanager
    async def running(self, connections: Connections) -> AsyncIterator[None]:
        async with ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE, socket_factory=connections.socket),
            cookie_jar=DummyCookieJar(),
            headers={VIA: self.mark},
            skip_auto_headers=_UNSAID,
            timeout=ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT),
            auto_decompress=False,
        ) as self.session:
            yield
