"""What a gateway and its engines leave to the garbage collector: transports, which are counted, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession
from serve.stage import CONFIG, COST, Scripted, say_nothing, staged, stop_in_mid_stream

from libra.route.baselines import LeastLoaded
from libra.serve.connections import CONNECTIONS
from libra.serve.emulate.live_engine import LiveEngine
from libra.serve.emulate.server import Emulator
from libra.serve.gateway.config import GatewayConfig, UpstreamSection
from libra.serve.gateway.server import Gateway
from libra.serve.http import serving
from libra.sim.engine.config import EngineSpec

TRANSPORT = {"_SelectorSocketTransport", "dict", "method", "socket", "TransportSocket", "tuple"}
ROUNDS = 5


async def post(session: ClientSession, path: str, body: dict[str, Any]) -> int:
    async with session.post(path, json=body) as response:
        await response.read()
        return response.status


async def use(session: ClientSession, engine: LiveEngine) -> None:
    """All that a client may do, and at last go away."""
    libra = {"trajectory": "t"}
    assert await post(session, "/v1/completions", {"prompt": [1] * 20, "libra": libra}) == 200
    following = {"prompt": [1] * 40, "stream": True, "libra": libra | {"tool": {"name": "x"}}}
    assert await post(session, "/v1/completions", following) == 200
    assert await post(session, "/trajectories/t/finish", {}) == 200
    assert await post(session, "/v1/chat/completions", {"messages": [{"role": "user", "content": "what?"}]}) == 200
    assert await post(session, "/v1/completions", {"prompt": 1}) == 400
    assert await post(session, "/v1/completions", {"prompt": [1] * 490, "max_tokens": 23}) == 400
    for path in ("/metrics", "/engines", "/v1/models", "/health"):
        async with session.get(path) as response:
            await response.read()
            assert response.status == 200
    for stream in (False, True):
        body = {"prompt": [1] * 20, "max_tokens": 400, "stream": stream}
        turn = asyncio.create_task(post(session, "/v1/completions", body))
        while not engine.running:
            await asyncio.sleep(0.005)
        turn.cancel()
        while engine.running:
            await asyncio.sleep(0.005)


def test_nothing_refers_to_itself_but_transports_and_connections_are_counted() -> None:
    async def main() -> None:
        emulator = Emulator([EngineSpec("e", CONFIG, COST)], 1.0, 10, 0)
        behind = emulator.application()
        async with serving(behind, "127.0.0.1", 0) as base:
            sections = (UpstreamSection(name="e", url=f"{base}/v1", max_model_len=512),)
            front = Gateway(GatewayConfig(engines=sections, turn_tokens=16), LeastLoaded()).application()
            async with serving(front, "127.0.0.1", 0) as base, ClientSession(base) as session:
                await use(session, emulator.engines["e"])  # what is set up once
                made = front[CONNECTIONS].made, behind[CONNECTIONS].made
                gc.collect()
                gc.disable()
                gc.set_debug(gc.DEBUG_SAVEALL)
                for _ in range(ROUNDS):
                    await use(session, emulator.engines["e"])
                gc.collect()
                found = [type(it).__name__ for it in gc.garbage]
                at_front, at_back = (it[CONNECTIONS].made - was for it, was in zip((front, behind), made, strict=True))
        assert set(found) <= TRANSPORT
        # Each round breaks off two turns: a connection of the client's to the gateway, and the gateway's to the engine.
        assert at_back == 2 * ROUNDS and at_front == 2 * at_back
        if sys.version_info < (3, 12):  # two ends each; the last to end may not have ended, and those of before have
            assert at_front <= found.count("_SelectorSocketTransport") <= 3 * at_front

    try:
        asyncio.run(main())
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def answer_unavailable(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")


async def answer_no_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"what?\r\n\r\n")


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


FAILURES = (answer_unavailable, answer_no_http, hang_up, say_nothing, stop_in_mid_stream)
REFUSED: tuple[tuple[str, dict[str, str], bytes, int], ...] = (
    ("/v1/completions", {}, b"{", 400),
    ("/v1/completions", {}, b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    ("/v1/completions", {}, b'{"stream_options": 7}', 400),
    ("/v1/completions", {}, b'{"stream_options": {"x": [%s[]]}}' % (b"[]," * 5000), 400),
    ("/v1/completions", {}, b'{"libra": {"trajectory": "%s"}}' % (b"x" * 5000), 400),
    ("/v1/completions", {"Content-Encoding": "gzip"}, b"no", 400),
    ("/v1/completions", {"Content-Encoding": "br"}, b"no", 415),
    ("/v1/completions", {"Content-Type": "text/plain"}, b"{}", 415),
    ("/v1/completions", {"Host": "example.com"}, b"{}", 403),
    ("/v1/completions", {}, bytes(2**26 + 1), 413),
    ("/trajectories/x/finish", {}, b"{}", 404),
    ("/trajectories/x/finish", {}, b'{"reward": "much"}', 400),
)


async def fail(session: ClientSession, number: int) -> None:
    """A turn that fails on every engine, and requests that are refused."""
    for stream in (False, True):
        body = {"prompt": [1] * 20, "max_tokens": 5, "stream": stream, "libra": {"trajectory": f"t{number}"}}
        await post(session, "/v1/completions", body)
    for path, headers, content, status in REFUSED:
        headers = {"Content-Type": "application/json"} | headers
        async with session.post(path, data=content, headers=headers) as response:
            await response.read()
            assert response.status == status


@pytest.mark.parametrize("script", FAILURES)
def test_no_failure_and_no_refusal_refers_to_itself(script: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
    async def main() -> None:
        times = {"wait_seconds": 0.1, "turn_timeout_seconds": 0.2, "max_attempts": 2}
        async with staged(engines=0, scripted=[Scripted(script) for _ in range(2)], **times) as stage:
            await fail(stage.session, 0)  # what is set up once
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            for number in range(ROUNDS):
                for name in ("s0", "s1"):
                    stage.mark(name, healthy=True)
                await fail(stage.session, 1 + number)
            gc.collect()
            found = {type(it).__name__ for it in gc.garbage}
            assert found <= TRANSPORT

    try:
        asyncio.run(main())
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
