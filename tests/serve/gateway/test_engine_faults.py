"""Engines that answer with errors, or are full: a turn is tried elsewhere, and the engine is judged by it."""

from __future__ import annotations

import asyncio
import json

import pytest
from serve.field_engine import FieldEngine
from serve.stage import Scripted, Stage, staged

from libra.serve.gateway import health, upstreams

BODY = {"messages": [{"role": "user", "content": "a"}], "n": 2}  # several samples: no turn follows another one's prefix


async def statuses(stage: Stage, turns: int) -> list[int]:
    return [(await stage.post("/v1/chat/completions", BODY))[0] for _ in range(turns)]


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RECHECK_SECONDS", 0.01)


async def test_a_dead_engine_that_answers_at_once_is_out_after_one_turn() -> None:
    engines = [FieldEngine(), FieldEngine()]
    async with staged(engines=0, fields=engines) as stage, asyncio.timeout(10):
        engines[0].status, engines[0].health = 500, 503
        assert await statuses(stage, 8) == [200] * 8
        while stage.engine("f0").healthy:
            assert await statuses(stage, 1) == [200]
        # Its turns may have put it out before its health did.
        while stage.engine("f0").problem != "/health answers with status 503":
            await asyncio.sleep(0.005)
        assert "gone f0" in stage.policy.calls


async def test_an_engine_that_leaves_service_and_comes_back_is_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = [FieldEngine(health=503), FieldEngine()]
    async with staged(engines=0, fields=engines) as stage, asyncio.timeout(10):
        for engine, health in ((engines[1], 503), (engines[0], 200), (engines[1], 200)):
            name, engine.health = f"f{engines.index(engine)}", health
            stage.engine(name).look.set()
            while stage.engine(name).healthy != (health == 200):
                await asyncio.sleep(0.005)
    assert [record.getMessage() for record in caplog.records if record.name == upstreams.__name__] == [
        "engine f0 is out of service: /health answers with status 503",
        "engine f1 is out of service: /health answers with status 503",
        "engine f0 is in service",
        "engine f1 is in service",
    ]


async def test_an_engine_that_fails_what_others_serve_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "_REST_SECONDS", 1000.0)
    engines = [FieldEngine(status=500), FieldEngine()]
    async with staged(engines=0, fields=engines) as stage, asyncio.timeout(20):

        async def rested() -> None:
            stage.engine("f0").rests_until = 0.0
            while not stage.engine("f0").healthy:
                await asyncio.sleep(0.005)

        assert await statuses(stage, 20) == [200] * 20
        assert engines[0].turns() == 3 and not stage.engine("f0").healthy  # /health answers 200 all the time
        assert stage.engine("f0").problem == "it failed 3 turns in sequence that other engines served"
        await rested()
        assert await statuses(stage, 5) == [200] * 5 and engines[0].turns() == 4  # one is enough after its rest
        engines[0].status = 200
        await rested()
        await statuses(stage, 3)
        engines[0].status = 500
        await statuses(stage, 2)
        assert stage.engine("f0").healthy  # it served in between: three are needed again
        await statuses(stage, 1)
        assert not stage.engine("f0").healthy


async def test_a_turn_that_every_engine_fails_costs_no_engine_its_place() -> None:
    engines = [FieldEngine(status=500) for _ in range(3)]
    async with staged(engines=0, fields=engines) as stage:
        for _ in range(5):
            status, said = await stage.post("/v1/chat/completions", BODY)
            assert status == 500 and said["error"]["message"] == "no"  # an engine's own words
        assert len(stage.gateway.upstreams.instances) == 3 and stage.gateway.counts.turns == 0
        assert [engine.turns() for engine in engines] == [5] * 3


async def test_a_turn_that_another_engine_refuses_is_to_blame_itself() -> None:
    engines = [FieldEngine(status=500), FieldEngine(status=400)]
    async with staged(engines=0, fields=engines) as stage:
        assert await statuses(stage, 5) == [400] * 5
        assert [engine.turns() for engine in engines] == [5, 5] and len(stage.gateway.upstreams.instances) == 2


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_engine_stays_and_the_turn_goes_elsewhere(status: int) -> None:
    engines = [FieldEngine(status=status), FieldEngine()]
    async with staged(engines=0, fields=engines) as stage:
        assert await statuses(stage, 10) == [200] * 10
        assert len(stage.gateway.upstreams.instances) == 2 and engines[0].turns() > 0
        engines[1].status = status
        async with asyncio.timeout(2), stage.session.post("/v1/chat/completions", json=BODY) as response:
            assert response.status == status and response.headers["Retry-After"] == "7"
        assert len(stage.gateway.upstreams.instances) == 2 and "gone f0" not in stage.policy.calls
        asked = sum(engine.turns() for engine in engines)
        await statuses(stage, 1)
        assert sum(engine.turns() for engine in engines) == asked + 2  # each engine once


async def test_a_trajectory_of_a_full_engine_goes_on_elsewhere() -> None:
    engines = [FieldEngine(), FieldEngine()]
    async with staged(engines=0, fields=engines) as stage:
        body = {"messages": [{"role": "user", "content": "a"}], "libra": {"trajectory": "t"}}
        assert (await stage.post("/v1/chat/completions", body))[0] == 200
        first = engines[0] if engines[0].turns() else engines[1]
        first.status = 503
        for _ in range(2):
            assert (await stage.post("/v1/chat/completions", body))[0] == 200
        await stage.post("/trajectories/t/finish", {})
        assert len(stage.finished[0].turns) == 3


async def test_an_engine_that_resets_a_connection_is_checked_soon() -> None:
    resets = 0

    async def reset_once(writer: asyncio.StreamWriter) -> None:
        nonlocal resets
        resets += 1
        if resets == 1:
            writer.transport.abort()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with staged(engines=0, scripted=[Scripted(reset_once)]) as stage, asyncio.timeout(10):
        loop = asyncio.get_running_loop()
        turn = asyncio.create_task(stage.post("/v1/completions", {"prompt": "a"}))
        while "gone s0" not in stage.policy.calls:
            await asyncio.sleep(0.005)
        lost = loop.time()
        assert (await turn)[0] == 200 and stage.engine("s0").healthy
        assert stage.engine("s0").checked - lost <= 1.0


async def test_a_long_header_is_refused_without_its_content() -> None:
    async with staged(engines=0, fields=[FieldEngine()]) as stage:
        port = stage.session._base_url.port  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        token = b"secret-token-" * 800
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n" % token)
        answer = await reader.read()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == b"400" and b"application/json" in head and b"secret" not in answer
        error = json.loads(body)["error"]
        assert error["code"] == 400 and "send shorter headers" in error["message"]
        writer.close()
