"""The pace of engines, as a gateway learns it from their answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from serve.stage import Scripted, staged


def answering(seconds: float) -> Scripted:
    async def answer(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        body = b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 8, "completion_tokens": 1000}}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)

    return Scripted(answer)


async def test_each_engine_has_the_pace_of_its_own_answers_and_metrics_tell_it() -> None:
    turn: dict[str, Any] = {"prompt": [5] * 8, "max_tokens": 10}
    async with staged(engines=0, scripted=[answering(0.05), answering(0.5)]) as stage:
        quick, slow = stage.engine("s0"), stage.engine("s1")
        assert quick.token_seconds is slow.token_seconds is None
        for one, other in (("s0", "s1"), ("s1", "s0")):
            stage.mark(one, True)
            stage.mark(other, False)
            answers = await asyncio.gather(*(stage.post("/v1/completions", turn) for _ in range(40)))
            assert {status for status, _ in answers} == {200}
            if other == "s1":
                assert quick.token_seconds == pytest.approx(slow.token_seconds)  # for want of other turns
        stage.mark("s0", True)
        assert quick.token_seconds is not None and slow.token_seconds is not None
        assert 0 < quick.token_seconds < slow.token_seconds
        assert {it.id: it.pace_class for it in stage.gateway.upstreams.fleet(16).instances} == {"s0": 0, "s1": 1}
        async with stage.session.get("/metrics") as answer:
            told = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[0] != "#")
        for engine in (quick, slow):
            pace = float(told[f'libra_gateway_engine_token_seconds{{engine="{engine.id}"}}'])
            assert pace == pytest.approx(engine.token_seconds)


async def test_an_engine_that_answered_nothing_yet_has_no_pace_in_the_metrics() -> None:
    async with staged(engines=1) as stage, stage.session.get("/metrics") as answer:
        text = await answer.text()
        assert "libra_gateway_engine_token_seconds{" not in text and "libra_gateway_engine_healthy{" in text
