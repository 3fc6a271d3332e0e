"""Load of others on the engines of a gateway: it counts as long as it is there, and turns go elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import ClientSession
from serve.stage import staged

from libra.serve.gateway.others_load import OthersLoad

USUAL = 100


async def test_requests_of_others_are_load_until_they_are_over() -> None:
    async with staged(engines=2) as stage, ClientSession() as other:
        busy, idle = stage.engine("e0"), stage.engine("e1")
        contexts: list[int] = []
        looking = OthersLoad(stage.gateway.upstreams, stage.gateway.client, lambda: contexts, USUAL)

        async def ask(tokens: int) -> Any:
            body = {"prompt": [1] * 8, "max_tokens": tokens}
            async with other.post(f"{busy.section.url}/completions", json=body) as answer:
                return await answer.json()

        theirs = [asyncio.create_task(ask(400)) for _ in range(3)]
        while busy.load_tokens < 3 * USUAL:
            await looking.look()
        assert (busy.load_tokens, idle.load_tokens) == (3 * USUAL, 0)
        contexts.append(60)
        await looking.look()
        assert busy.load_tokens in (3 * 60, 2 * 60)  # one may be over
        status, _ = await stage.post("/v1/completions", {"prompt": [1] * 8, "max_tokens": 4})
        assert status == 200 and idle.turns == 1 and busy.turns == 0
        await asyncio.gather(*theirs)
        while busy.load_tokens:
            await looking.look()


async def test_turns_of_its_own_are_not_counted_twice() -> None:
    async with staged(engines=1) as stage:
        engine = stage.engine("e0")
        looking = OthersLoad(stage.gateway.upstreams, stage.gateway.client, lambda: [], USUAL)
        turn = asyncio.create_task(stage.post("/v1/completions", {"prompt": [1] * 8, "max_tokens": 300}))
        while not engine.in_flight:
            await asyncio.sleep(0)
        await looking.look()
        assert engine.in_flight == 1 and engine.load_tokens == 8
        assert (await turn)[0] == 200
        await looking.look()
        assert engine.load_tokens == 0
