"""Every endpoint of the gateway is guarded: by the token, the Host header, the Origin, and the limit of bodies."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from serve.stage import RecordingPolicy

from libra.config.listeners import GATEWAY
from libra.serve.gateway.config import gateway_of
from libra.serve.gateway.server import Gateway
from libra.serve.http import serving

TOKEN = "token"
PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"


@asynccontextmanager
async def served(token: str | None) -> AsyncIterator[tuple[ClientSession, list[tuple[str, str]]]]:
    """A client of a gateway without engines, and the (method, path) of all its endpoints."""
    application = Gateway(gateway_of([], None, ["127.0.0.1"]), RecordingPolicy(), guarded=True).application()
    endpoints = [(route.method, path_of(route)) for route in application.router.routes()]
    async with serving(application, "127.0.0.1", 0, GATEWAY, token) as base, ClientSession(base) as session:
        yield session, endpoints


def path_of(route: web.AbstractRoute) -> str:
    assert route.resource is not None
    return re.sub(r"\{[^}]*\}", "x", route.resource.canonical)


async def test_the_endpoints_are_those_of_the_docs() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| request |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`(?:[A-Z]+ )?(/[\w/]+)", table))
    async with served(None) as (_, endpoints):
        found = {re.sub(r"/x\b", "/URL" if path.startswith("/workers") else "/ID", path) for _, path in endpoints}
    assert found == documented


@pytest.mark.parametrize(
    ("token", "headers", "status"),
    [
        (TOKEN, {}, 401),
        (TOKEN, {"Authorization": "Bearer other"}, 401),
        (None, {"Host": "elsewhere"}, 403),
        (None, {"Origin": "http://elsewhere"}, 403),
    ],
)
async def test_no_endpoint_is_open(token: str | None, headers: dict[str, str], status: int) -> None:
    async with served(token) as (session, endpoints):
        for method, path in endpoints:
            open_to_all = (token is not None and path == "/health") or ("Origin" in headers and method != "POST")
            if open_to_all and method != "DELETE":
                continue
            async with session.request(method, path, headers=headers) as response:
                assert response.status == status, (method, path)


async def test_no_endpoint_reads_without_end() -> None:
    async with served(None) as (session, endpoints):
        for path in (path for method, path in endpoints if method == "POST"):
            body = b"x" * (GATEWAY.body_most(0) + 1)
            headers = {"Content-Type": "application/json"}
            async with session.post(path, data=body, headers=headers) as response:
                # Endpoints that read no body answer without it.
                reads_none = path in ("/add_worker", "/remove_worker", "/finish_session", "/trajectories/x/forget")
                assert reads_none or response.status == 413, (path, response.status)
