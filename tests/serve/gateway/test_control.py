"""Control requests of trainers reach all engines, and the worst answer is the client's."""

from __future__ import annotations

import pytest
from aiohttp import ClientResponse
from serve.field_engine import FieldEngine
from serve.stage import staged

from libra.serve.gateway.control import TO_ALL


def asked(engine: FieldEngine) -> list[tuple[str, str, object]]:
    return [(it.method, it.path, it.body) for it in engine.asked]


@pytest.mark.parametrize("path", TO_ALL)
async def test_a_control_request_reaches_every_engine(path: str) -> None:
    engines = [FieldEngine() for _ in range(3)]
    async with staged(engines=0, fields=engines) as stage:
        status, _ = await stage.post(f"{path}?mode=keep", {"tags": ["weights"]})
        assert status == 200
        assert [asked(engine) for engine in engines] == [[("POST", f"{path}?mode=keep", {"tags": ["weights"]})]] * 3


async def test_the_worst_answer_is_told() -> None:
    engines = [FieldEngine(), FieldEngine(control=409), FieldEngine(control=500)]
    async with staged(engines=0, fields=engines) as stage:
        assert (await stage.post("/pause", {}))[0] == 500
        engines[2].control = 200
        assert (await stage.post("/pause", {}))[0] == 409
        engines[1].control = 200
        async with stage.session.post("/resume") as response:  # without a body
            assert response.status == 200
        async with stage.session.get("/is_paused") as response:
            assert response.status == 200 and await response.json() == {"path": "/is_paused"}


async def test_engines_out_of_service_miss_it() -> None:
    engines = [FieldEngine(), FieldEngine()]
    async with staged(engines=0, fields=engines) as stage:
        stage.mark("f1", healthy=False)
        assert (await stage.post("/pause", {}))[0] == 200
        assert [len(engine.asked) for engine in engines] == [1, 0]
        stage.mark("f0", healthy=False)
        status, said = await stage.post("/pause", {})
        assert status == 503 and "no engine is healthy" in said["error"]["message"]


async def test_each_engine_has_ranks_of_its_own() -> None:
    engines = [FieldEngine(ranks=2), FieldEngine(ranks=4), FieldEngine(ranks=1)]

    async def size(response: ClientResponse) -> object:
        return (await response.json())["world_size"]

    async with staged(engines=0, fields=engines) as stage:
        async with stage.session.get("/get_world_size") as response:
            assert response.status == 200 and await size(response) == 7
        info = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 8}
        assert (await stage.post("/init_weight_transfer_engine", {"init_info": info}))[0] == 200
        bodies = [engine.asked[-1].body["init_info"] for engine in engines]
        assert bodies == [info | {"rank_offset": first} for first in (1, 3, 7)]
        assert (await stage.post("/init_weight_transfer_engine", {"init_info": {"packed": True}}))[0] == 200
        assert [engine.asked[-1].body for engine in engines] == [{"init_info": {"packed": True}}] * 3
        for wrong in ({}, {"init_info": []}, {"init_info": {"rank_offset": "one"}}):
            assert (await stage.post("/init_weight_transfer_engine", wrong))[0] == 400


async def test_an_owner_can_keep_control_to_itself() -> None:
    engine = FieldEngine()
    async with staged(engines=0, fields=[engine], control=False) as stage:
        assert (await stage.post("/collective_rpc", {"method": "x"}))[0] == 404
        assert (await stage.post("/tokenize", {"prompt": "a"}))[0] == 200
        assert [it.path for it in engine.asked] == ["/tokenize"]
