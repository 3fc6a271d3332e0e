"""The HTTP client of a gateway for its engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

from libra.serve.connections import Connections
from libra.serve.gateway.engine_connections import CONNECT_SECONDS, KEEPALIVE_SECONDS, EngineConnections
from libra.serve.gateway.loops import VIA, new_mark

_UNSAID = ("Accept", "User-Agent")  # headers that aiohttp must not add


class EngineClient:
    """While it runs, has `connections` for turns, and a `session` for all other requests. Each request has `mark` in
    its `Via` header."""

    session: ClientSession
    connections: EngineConnections

    def __init__(self) -> None:
        self.mark = new_mark()

    @asynccontextmanager
    async def running(self, connections: Connections) -> AsyncIterator[None]:
        async with ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, socket_factory=connections.socket),
            cookie_jar=DummyCookieJar(),
            headers={VIA: self.mark},
            skip_auto_headers=_UNSAID,
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
        ) as self.session:
            self.connections = EngineConnections(connections)
            closing = asyncio.create_task(self.connections.keep_closing())
            try:
                yield
            finally:
                closing.cancel()
                self.connections.close()
