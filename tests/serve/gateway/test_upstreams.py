"""Engines that stop without closing a connection: their turns are asked again elsewhere, or end with an error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest
from aiohttp import ClientSession
from serve.processes import EXAMPLES, ended, start
from serve.stage import Scripted, say_nothing, staged, stop_in_mid_stream

from libra.route.baselines import LeastLoaded
from libra.serve.gateway import health
from libra.serve.gateway.config import GatewayConfig, UpstreamSection
from libra.serve.gateway.server import Gateway
from libra.serve.http import serving

BODY: dict[str, Any] = {"prompt": [5] * 30, "max_tokens": 10, "libra": {"trajectory": "t"}}


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_CHECK_SECONDS": 0.05, "RECHECK_SECONDS": 0.05, "_CHECK_TIMEOUT": 0.5}.items():
        monkeypatch.setattr(health, name, seconds)


def last_error(text: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_of_an_engine_that_says_nothing_is_asked_again_elsewhere(stream: bool) -> None:
    async with staged(engines=1, scripted=[Scripted(say_nothing)], engine_timeout_seconds=0.3) as stage:
        stage.engine("e0").load_tokens += 1  # so the turn goes to the other, which hangs
        turn = asyncio.create_task(stage.session.post("/v1/completions", json=BODY | {"stream": stream}))
        async with asyncio.timeout(10):
            while not stage.engine("s0").in_flight:
                await asyncio.sleep(0.005)
            stage.scripted[0].well = False
            response = await turn
            text = await response.text()
        assert response.status == 200 and ("[DONE]" in text) == stream
        assert stage.gateway.counts.retries == 1 and "gone s0" in stage.policy.calls
        assert (await stage.post("/trajectories/t/finish", {}))[0] == 200
        assert [it.generated_tokens for it in stage.finished[0].turns] == [10]


async def test_a_stream_of_an_engine_that_stops_ends_with_an_error() -> None:
    async with staged(engines=0, scripted=[Scripted(stop_in_mid_stream)], engine_timeout_seconds=0.3) as stage:
        async with asyncio.timeout(10), stage.session.post("/v1/completions", json=BODY | {"stream": True}) as response:
            assert b"choices" in await response.content.readany()
            stage.scripted[0].well = False
            error = last_error((await response.read()).decode())
        assert error["code"] == 503 and "engine s0 has sent nothing for" in error["message"]
        assert stage.engine("s0").in_flight == stage.engine("s0").load_tokens == 0


@pytest.mark.parametrize("script", [say_nothing, stop_in_mid_stream])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_of_which_a_healthy_engine_says_nothing_ends_in_time(script: Any, stream: bool) -> None:
    async with staged(engines=0, scripted=[Scripted(script)], turn_timeout_seconds=0.3) as stage:
        async with asyncio.timeout(10):
            async with stage.session.post("/v1/completions", json=BODY | {"stream": stream}) as response:
                text = await response.text()
        begun = stream and script is stop_in_mid_stream
        assert response.status == (200 if begun else 504)
        message = last_error(text)["message"] if begun else json.loads(text)["error"]["message"]
        assert "has sent nothing of the turn for" in message and "turn_timeout_seconds" in message
        assert stage.engine("s0").healthy and stage.gateway.counts.retries == 0


async def test_a_turn_that_fails_on_every_engine_is_not_tried_for_ever() -> None:
    async def break_off(_: asyncio.StreamWriter) -> None:
        raise ConnectionResetError

    async with staged(engines=0, scripted=[Scripted(break_off)], max_attempts=3) as stage:
        status, answer = await stage.post("/v1/completions", BODY)
        assert status == 503 and "tried on 3 engines, each of which failed" in answer["error"]["message"]
        assert sum(head.startswith(b"POST") for head in stage.scripted[0].heads) == 3


async def test_an_engines_own_refusal_reaches_the_client_when_nobody_else_can() -> None:
    async def overloaded(writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 503 Busy\r\nRetry-After: 17\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\nbusy"
        )

    async with (
        staged(engines=0, scripted=[Scripted(overloaded)], max_attempts=2) as stage,
        stage.session.post("/v1/completions", json=BODY) as response,
    ):
        assert (response.status, response.headers["Retry-After"], await response.text()) == (503, "17", "busy")


async def test_models_are_listed_although_an_engine_says_nothing() -> None:
    async def two(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with (
        staged(engines=0, scripted=[Scripted(say_nothing), Scripted(two)]) as stage,
        asyncio.timeout(10),
        stage.session.get("/v1/models") as response,
    ):
        assert await response.text() == "{}"


def test_a_stopped_process_holds_no_turn() -> None:
    """SIGSTOP: the kernel goes on taking connections, and no byte comes."""

    async def main() -> None:
        both = [start("emulate", str(EXAMPLES / "engines.yaml"), "--speed", "5") for _ in range(2)]
        processes.extend(process for process, _ in both)
        sections = tuple(
            UpstreamSection(name=f"e{number}", url=it["engines"]["a100-0"], max_model_len=16384)
            for number, (_, it) in enumerate(both)
        )
        file = GatewayConfig(engines=sections, engine_timeout_seconds=1.0)
        gateway = Gateway(file, LeastLoaded())
        async with serving(gateway.application(), "127.0.0.1", 0) as base, ClientSession(base) as session:

            async def turn(stream: bool) -> str:
                body = {"prompt": [1] * 9, "max_tokens": 300, "stream": stream}
                async with session.post("/v1/completions", json=body) as response:
                    assert response.status == 200
                    return await response.text()

            async with asyncio.timeout(60):
                turns = [asyncio.create_task(turn(stream)) for stream in (False, True) * 4]
                while min(it.in_flight for it in gateway.upstreams.all.values()) < 4:
                    await asyncio.sleep(0.005)
                os.kill(processes[0].pid, signal.SIGSTOP)
                texts = await asyncio.gather(*turns)
                assert not gateway.upstreams.all["e0"].healthy and gateway.counts.retries >= 2
                for text in texts[1::2]:
                    assert "[DONE]" in text or "has sent nothing for" in last_error(text)["message"]
                os.kill(processes[0].pid, signal.SIGCONT)
                while not gateway.upstreams.all["e0"].healthy:
                    await asyncio.sleep(0.02)

    with ended() as processes:
        asyncio.run(main())


async def test_an_engine_that_failed_a_turn_is_checked_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_CHECK_SECONDS", 1000.0)
    failed = 0

    async def fail_once(writer: asyncio.StreamWriter) -> None:
        nonlocal failed
        failed += 1
        if failed == 1:
            writer.close()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with staged(engines=0, scripted=[Scripted(fail_once)]) as stage, asyncio.timeout(10):
        await asyncio.sleep(0.1)  # it waits for the next check
        assert (await stage.post("/v1/completions", BODY))[0] == 200 and failed == 2
