"""Engines that join and leave while the gateway runs, with the same requests as at other routers.

Invariant: only hosts that the owner allows may change the engines, and only engines on allowed hosts may join. By
default, only this machine is allowed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from pydantic import ValidationError

from libra.config.listeners import ENGINES, SMALL_BODY_BYTES
from libra.serve.answers import RefusedRequest, decoded
from libra.serve.bodies import body_of
from libra.serve.gateway.allowed_hosts import AllowedHosts
from libra.serve.gateway.config import UpstreamSection
from libra.serve.gateway.health import HealthMonitor
from libra.serve.gateway.upstreams import Upstream, Upstreams

_Count = Annotated[int, msgspec.Meta(ge=1)]


class JoinBody(msgspec.Struct):
    """Body of POST /workers. Other fields that routers know are ignored."""

    url: str
    max_model_len: _Count | None = None  # None: the gateway queries the engine
    bucket: Annotated[int, msgspec.Meta(ge=0)] | None = None  # None: the shortest with contexts of `max_model_len`


_join = msgspec.json.Decoder(JoinBody)


@dataclass(slots=True)
class Workers:
    """Handlers of requests about engines. Calls `lost` with each engine that leaves."""

    upstreams: Upstreams
    health: HealthMonitor
    allowed: AllowedHosts
    mark_lost: Callable[[Upstream, str], None]

    def routes(self) -> Iterator[web.RouteDef]:
        yield web.get("/workers", self.all)
        yield web.post("/workers", self._allowed(self.join))
        yield web.get("/workers/{url:.+}", self.one)
        yield web.delete("/workers/{url:.+}", self._allowed(self.leave))
        yield web.get("/list_workers", self.urls)
        yield web.post("/add_worker", self._allowed(self.join_by_query))
        yield web.post("/remove_worker", self._allowed(self.leave_by_query))

    def _allowed(
        self, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            if (request.remote or "") not in self.allowed:
                raise RefusedRequest("this host may not change the engines: add it to workers_from", 403)
            return await handler(request)

        return handle

    async def all(self, _: web.Request) -> web.Response:
        engines = self.upstreams.all.values()
        return web.json_response(
            {
                "workers": [_described(engine) for engine in engines],
                "total": len(engines),
                "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": len(engines)},
            }
        )

    async def urls(self, _: web.Request) -> web.Response:
        return web.json_response({"urls": [engine.section.root for engine in self.upstreams.all.values()]})

    async def one(self, request: web.Request) -> web.Response:
        return web.json_response(_described(self._named(request.match_info["url"])))

    async def join(self, request: web.Request) -> web.Response:
        try:
            asked = decoded(_join, await body_of(request, SMALL_BODY_BYTES))
        except ValueError as error:
            raise RefusedRequest(str(error), 400) from None
        engine = await self._join(asked)
        message = f"engine {engine.section.root} joins: " + (engine.problem or "it is in service")
        return web.json_response({"success": True, "message": message, "worker": _described(engine)})

    async def join_by_query(self, request: web.Request) -> web.Response:
        engine = await self._join(JoinBody(_query_url(request)))
        return web.Response(text=f"Successfully added worker: {engine.section.root}")

    async def leave(self, request: web.Request) -> web.Response:
        """Remove an engine. Removing an unknown engine succeeds too, so a trainer may repeat the request."""
        message = self._leave(request.match_info["url"])
        return web.json_response({"success": True, "message": message, "worker": None})

    async def leave_by_query(self, request: web.Request) -> web.Response:
        url = _query_url(request)
        self._leave(url)
        return web.Response(text=f"Successfully removed worker: {url}")

    async def _join(self, asked: JoinBody) -> Upstream:
        """Add an engine. A known engine counts as restarted, without cached prefixes."""
        section = self._section(asked)
        known = self._found(section.url)
        if known is not None:
            self.mark_lost(known, "it joins again, so it was restarted")
            await self.health.check(known)
            return known
        if section.name in self.upstreams.all:
            raise RefusedRequest(f"another engine has the name {section.name}", 409)
        if len(self.upstreams.all) >= ENGINES:
            raise RefusedRequest(f"the gateway has {ENGINES} engines, the maximum: remove some", 429)
        engine = self.upstreams.join(section)
        await self.health.check(engine)
        if self.upstreams.all.get(engine.id) is not engine:
            raise RefusedRequest(f"engine {section.root} left while it was checked", 409)
        if asked.bucket is None and engine.capacity_tokens:
            limits = self.upstreams.limits
            engine.bucket = min(bisect_left(limits, engine.capacity_tokens), len(limits) - 1)
            self.upstreams.refresh()
        self.health.watch(engine)
        return engine

    def _section(self, asked: JoinBody) -> UpstreamSection:
        try:
            section = UpstreamSection(
                name="joins",
                url=asked.url,
                max_model_len=asked.max_model_len,
                bucket=asked.bucket or 0,
            )
        except ValidationError as error:
            raise RefusedRequest(f"url: {error.errors()[0]['msg']}", 400) from None
        host = urlsplit(section.url).hostname or ""
        if host not in self.allowed:
            raise RefusedRequest(f"engines on {host} may not join: add the host to workers_from", 403)
        if section.basic_auth is not None:
            raise RefusedRequest("url contains a password: list engines with a password in the file instead", 400)
        if section.bucket >= len(self.upstreams.limits):
            raise RefusedRequest(
                f"bucket is {section.bucket}, but limits names {len(self.upstreams.limits)} buckets, from 0", 400
            )
        return section.model_copy(update={"name": section.root.partition("://")[2]})

    def _leave(self, url: str) -> str:
        """Send an engine no more turns. Returns a message for the client."""
        engine = self._found(url)
        if engine is None:
            return f"there is no engine {url}"
        self.upstreams.leave(engine)
        self.mark_lost(engine, "it was removed")
        return f"engine {engine.section.root} leaves"

    def _named(self, url: str) -> Upstream:
        engine = self._found(url)
        if engine is None:
            raise RefusedRequest(f"there is no engine {url}: see GET /workers", 404)
        return engine

    def _found(self, url: str) -> Upstream | None:
        root = url.rstrip("/").removesuffix("/v1")
        return next((it for it in self.upstreams.all.values() if it.section.root == root), None)


def _query_url(request: web.Request) -> str:
    url = request.query.get("url")
    if not url:
        raise RefusedRequest("name the engine: ?url=http://HOST:PORT", 400)
    return url


def _described(engine: Upstream) -> dict[str, Any]:
    """An engine in vllm-router's format."""
    return {
        "url": engine.section.root,
        "model_id": "unknown",
        "worker_type": "regular",
        "is_healthy": engine.healthy,
        "load": engine.in_flight,
        "connection_mode": "Http",
        "priority": 50,
        "cost": 1.0,
        "max_model_len": engine.capacity_tokens or None,
        "problem": engine.problem,
    }
