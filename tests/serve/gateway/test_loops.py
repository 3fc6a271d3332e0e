"""Gateways whose engines lead back to them: a turn ends with an error instead of running in a circle."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack

from serve.stage import Scripted, Stage, staged

from libra.serve.gateway.loops import VIA

TURN = {"messages": [{"role": "user", "content": "a"}]}


def joining(stage: Stage) -> dict[str, object]:
    return {"url": stage.base, "max_model_len": 512}


async def test_a_gateway_that_joins_itself_is_out_of_service() -> None:
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(engines=1))
        status, said = await stage.post("/workers", joining(stage))
        assert status == 200 and not said["worker"]["is_healthy"] and "508" in said["worker"]["problem"]
        for number in range(4):  # the policy has only the engine
            assert (await stage.post("/v1/chat/completions", TURN | {"libra": {"trajectory": f"{number}"}}))[0] == 200


async def test_a_turn_in_a_circle_of_gateways_ends_at_an_engine() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(staged(engines=0, workers_from=("127.0.0.1",)))
        second = await stack.enter_async_context(staged(engines=1))
        for stage, other in ((first, second), (second, first)):
            status, said = await stage.post("/workers", joining(other))
            assert status == 200 and said["worker"]["is_healthy"]  # the health of a gateway asks no other one
        for number in range(6):
            status, _ = await first.post("/v1/chat/completions", TURN | {"libra": {"trajectory": f"{number}"}})
            assert status == 200
        assert len(second.policy.calls) < 40  # no turn was routed again and again


async def test_marks_of_gateways_before_reach_the_engine_and_an_own_one_ends_a_request() -> None:
    async def answer(writer: object) -> None:
        writer.write(b"HTTP/1.1 400 no\r\nContent-Length: 2\r\n\r\n{}")  # type: ignore[attr-defined]

    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(engines=0, scripted=[Scripted(answer)]))
        mark = stage.gateway.client.mark
        for given, passed in (({}, mark), ({VIA: "1.1 another"}, f"1.1 another, {mark}")):
            await stage.session.post("/v1/chat/completions", json=TURN, headers=given)
            heads = [head.decode() for head in stage.scripted[0].heads if head.startswith(b"POST")]
            assert re.findall(rf"{VIA}: (.*)\r", heads[-1]) == [passed]
        async with stage.session.post("/v1/completions", json=TURN, headers={VIA: f"1.1 x, {mark}"}) as response:
            assert response.status == 508
            assert "leads back to it" in (await response.json())["error"]["message"]
