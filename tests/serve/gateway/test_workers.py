"""Engines that join and leave, by the requests of the field's routers, from hosts that the owner allows."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from urllib.parse import quote

import pytest
from serve.field_engine import FieldEngine
from serve.stage import Stage, staged

from libra.serve.gateway import health, workers
from libra.serve.gateway.allowed_hosts import AllowedHosts

TURN = {"messages": [{"role": "user", "content": "a"}]}


async def urls(stage: Stage) -> list[str]:
    async with stage.session.get("/list_workers") as response:
        found: list[str] = (await response.json())["urls"]
        return found


async def test_an_engine_joins_serves_and_leaves() -> None:
    engine = FieldEngine(max_model_len=777)
    async with AsyncExitStack() as stack:
        root = await stack.enter_async_context(engine.serving())
        stage = await stack.enter_async_context(staged(engines=0, workers_from=("127.0.0.1",)))
        status, said = await stage.post("/v1/chat/completions", TURN)
        assert status == 503 and "no engine is in service" in said["error"]["message"]
        status, said = await stage.post("/workers", {"url": root, "model_id": "m", "worker_type": "regular"})
        assert status == 200 and said["success"] and said["worker"]["is_healthy"]
        assert said["worker"]["url"] == root and said["worker"]["max_model_len"] == 777
        assert stage.gateway.upstreams.limits == (777,)
        assert (await stage.post("/v1/chat/completions", TURN | {"libra": {"trajectory": "t"}}))[0] == 200
        async with stage.session.get("/workers") as response:
            listed = await response.json()
        assert listed["total"] == 1 and listed["workers"][0]["url"] == root and await urls(stage) == [root]
        async with stage.session.get(f"/workers/{quote(root, safe='')}") as response:
            assert (await response.json())["is_healthy"]
        async with stage.session.delete(f"/workers/{quote(root, safe='')}") as response:
            assert response.status == 200 and (await response.json())["success"]
        (name,) = (call for call in stage.policy.calls if str(call).startswith("gone"))
        assert name == f"gone {root.removeprefix('http://')}" and await urls(stage) == []
        async with stage.session.delete(f"/workers/{quote(root, safe='')}") as response:
            assert response.status == 200 and "there is no engine" in (await response.json())["message"]
        async with stage.session.get(f"/workers/{quote(root, safe='')}") as response:
            assert response.status == 404


async def test_more_engines_than_the_limit_may_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ENGINES", 2)
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(engines=1))
        second, third = [await stack.enter_async_context(FieldEngine().serving()) for _ in range(2)]
        assert (await stage.post("/workers", {"url": second}))[0] == 200
        status, said = await stage.post("/workers", {"url": third})
        assert status == 429 and "has 2 engines, the maximum" in said["error"]["message"]
        assert (await stage.post("/workers", {"url": second}))[0] == 200  # it has started again
        await stage.session.delete(f"/workers/{quote(second, safe='')}")
        assert (await stage.post("/workers", {"url": third}))[0] == 200


async def test_the_older_requests_mean_the_same() -> None:
    engine = FieldEngine()
    async with AsyncExitStack() as stack:
        root = await stack.enter_async_context(engine.serving())
        stage = await stack.enter_async_context(staged(engines=1))
        async with stage.session.post("/add_worker", params={"url": root}) as response:
            assert response.status == 200 and root in await response.text()
        assert root in await urls(stage)
        async with stage.session.post("/add_worker", params={"url": f"{root}/v1/"}) as response:
            assert response.status == 200  # it has started again
        assert len(await urls(stage)) == 2
        async with stage.session.post("/remove_worker", params={"url": root}) as response:
            assert response.status == 200
        assert root not in await urls(stage)
        async with stage.session.post("/add_worker") as response:
            assert response.status == 400


async def test_an_engine_that_is_not_up_yet_joins_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RECHECK_SECONDS", 0.02)
    engine = FieldEngine(health=503)
    async with AsyncExitStack() as stack:
        root = await stack.enter_async_context(engine.serving())
        stage = await stack.enter_async_context(staged(engines=0, workers_from=("127.0.0.1",)))
        status, said = await stage.post("/workers", {"url": root})
        assert status == 200 and not said["worker"]["is_healthy"] and "status 503" in said["worker"]["problem"]
        engine.health = 200
        async with asyncio.timeout(10):
            while not stage.gateway.upstreams.instances:
                await asyncio.sleep(0.01)
        assert (await stage.post("/v1/chat/completions", TURN))[0] == 200


async def test_an_engine_that_tells_no_length_says_what_is_missing() -> None:
    engine = FieldEngine(max_model_len=None)
    async with AsyncExitStack() as stack:
        root = await stack.enter_async_context(engine.serving())
        stage = await stack.enter_async_context(staged(engines=1))
        _, said = await stage.post("/workers", {"url": root})
        assert "reports no max_model_len" in said["worker"]["problem"] and len(stage.gateway.upstreams.instances) == 1
        async with stage.session.post("/remove_worker", params={"url": root}):
            pass
        _, said = await stage.post("/workers", {"url": root, "max_model_len": 300})
        assert said["worker"]["is_healthy"] and said["worker"]["max_model_len"] == 300


@pytest.mark.parametrize(("length", "bucket"), [(100, 0), (101, 1), (4096, 1), (9999, 1)])
async def test_an_engine_joins_the_bucket_that_it_holds(length: int, bucket: int) -> None:
    engine = FieldEngine(max_model_len=length)
    async with AsyncExitStack() as stack:
        root = await stack.enter_async_context(engine.serving())
        stage = await stack.enter_async_context(staged(engines=1, buckets=(100, 4096)))
        await stage.post("/workers", {"url": root})
        assert stage.engine(root.removeprefix("http://")).bucket == bucket


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 400, "missing required field `url`"),
        ({"url": "ftp://127.0.0.1"}, 400, "url: "),
        ({"url": "http://me:secret@127.0.0.1:1"}, 400, "url contains a password"),
        ({"url": "http://10.1.2.3:8000"}, 403, "engines on 10.1.2.3 may not join: add the host to workers_from"),
        ({"url": "http://elsewhere:8000"}, 403, "engines on elsewhere may not join"),
        ({"url": "http://127.0.0.1:1", "bucket": 3}, 400, "bucket is 3, but limits names 1 bucket"),
        ({"url": "http://127.0.0.1:1", "max_model_len": 0}, 400, "max_model_len"),
    ],
)
async def test_an_engine_that_may_not_join_is_refused(body: dict[str, object], status: int, says: str) -> None:
    async with staged(engines=1) as stage:
        found, said = await stage.post("/workers", body)
        assert found == status and says in said["error"]["message"] and "secret" not in said["error"]["message"]
        assert len(stage.gateway.upstreams.all) == 1


async def test_turns_in_flight_on_an_engine_that_leaves_go_on() -> None:
    async with staged(engines=2) as stage:
        body = {"prompt": [5] * 30, "max_tokens": 100}
        turns = [asyncio.create_task(stage.post("/v1/completions", body)) for _ in range(4)]
        while min(it.in_flight for it in stage.gateway.upstreams.all.values()) < 2:
            await asyncio.sleep(0.005)
        (root, *_) = await urls(stage)
        async with stage.session.delete(f"/workers/{quote(root, safe='')}") as response:
            assert response.status == 200
        assert [status for status, _ in await asyncio.gather(*turns)] == [200] * 4
        assert stage.gateway.counts.retries == 0 and len(stage.gateway.upstreams.instances) == 1


@pytest.mark.parametrize(
    ("given", "host", "found"),
    [
        ((), "127.0.0.1", True),
        ((), "::1", True),
        ((), "::ffff:127.0.0.1", True),
        ((), "localhost", True),
        ((), "10.0.0.1", False),
        ((), "", False),
        (("10.0.0.0/8",), "10.1.2.3", True),
        (("10.0.0.0/8",), "::ffff:10.1.2.3", True),
        (("10.0.0.0/8",), "11.1.2.3", False),
        (("10.0.0.7",), "10.0.0.7", True),
        (("Node-7.local",), "node-7.LOCAL", True),
        (("node-7",), "node-70", False),
    ],
)
def test_hosts_are_allowed_as_they_are_written(given: tuple[str, ...], host: str, found: bool) -> None:
    assert (host in AllowedHosts.of(given)) == found


@pytest.mark.parametrize("given", ["10.0.0.0/33", "10.0.0", "a b", "", "http://a"])
def test_what_is_no_host_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="is not a host: give an address, a network"):
        AllowedHosts.of((given,))
