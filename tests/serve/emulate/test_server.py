"""The server over a socket: shapes, streams, refusals, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession

from libra.serve.emulate.server import Emulator
from libra.serve.http_service import serving
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost

CONFIG = EngineConfig(max_model_len=512, kv_blocks=200, block_size=8, max_num_seqs=2, max_num_batched_tokens=64)
COST = AffineCost(2 * 10**9)  # 2 ms an iteration
DEFAULT = 7

Client = Callable[..., Awaitable[tuple[int, Any]]]


def served(test: Callable[[ClientSession, str, Emulator], Awaitable[None]], engines: int = 1) -> None:
    async def main() -> None:
        emulator = Emulator([EngineSpec(f"e{it}", CONFIG, COST) for it in range(engines)], 1.0, DEFAULT, 0)
        async with serving(emulator.application(), "127.0.0.1", 0) as base, ClientSession(base) as session:
            await test(session, "/v1", emulator)

    asyncio.run(main())


async def post(session: ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


async def events(session: ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    async with session.post(path, json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


def test_a_completion_has_the_tokens_that_were_asked_for_when_they_are_there() -> None:
    async def test(session: ClientSession, base: str, _: Emulator) -> None:
        began = time.monotonic()
        status, answer = await post(
            session,
            f"{base}/completions",
            {"model": "m", "prompt": list(range(20)), "max_tokens": 50, "logprobs": 0, "return_token_ids": True},
        )
        assert status == 200
        assert time.monotonic() - began >= 50 * 2e-3  # a prompt's iteration generates the first one
        (choice,) = answer["choices"]
        assert answer["object"] == "text_completion" and answer["model"] == "m"
        assert choice["finish_reason"] == "length" and choice["prompt_token_ids"] == list(range(20))
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 50
        assert len(choice["text"]) == 200
        assert answer["usage"] == {
            "prompt_tokens": 20,
            "completion_tokens": 50,
            "total_tokens": 70,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    served(test)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_later_turn_finds_the_earlier_one_in_the_cache(as_text: bool) -> None:
    async def test(session: ClientSession, base: str, _: Emulator) -> None:
        prompt: Any = "what is the answer to this one? " if as_text else list(range(8))
        _, first = await post(
            session, f"{base}/completions", {"prompt": prompt, "max_tokens": 17, "return_token_ids": True}
        )
        (choice,) = first["choices"]
        longer = prompt + (choice["text"] + "and?" if as_text else [*choice["token_ids"], 5])
        _, second = await post(session, f"{base}/completions", {"prompt": longer, "max_tokens": 1})
        assert second["usage"]["prompt_tokens"] == 8 + 17 + 1
        # The last token that was generated is in no cache, so that of 25 tokens 24 are found: three blocks of eight.
        assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 24}
        _, salted = await post(session, f"{base}/completions", {"prompt": longer, "max_tokens": 1, "cache_salt": "x"})
        assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    served(test)


def test_a_chat_without_max_tokens_ends_by_itself() -> None:
    async def test(session: ClientSession, base: str, _: Emulator) -> None:
        messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": [{"type": "text", "text": "!"}]}]
        _, answer = await post(session, f"{base}/chat/completions", {"messages": messages, "temperature": 0.3})
        (choice,) = answer["choices"]
        assert answer["object"] == "chat.completion" and choice["finish_reason"] == "stop"
        assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 4 * DEFAULT
        assert answer["usage"]["completion_tokens"] == DEFAULT

    served(test)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_has_all_tokens_once(chat: bool) -> None:
    async def test(session: ClientSession, base: str, _: Emulator) -> None:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
        asked |= {"max_tokens": 60, "stream_options": {"include_usage": True}, "return_token_ids": True}
        *pieces, usage = await events(session, f"{base}/{'chat/' * chat}completions", asked)
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 60
        choices = [piece["choices"][0] for piece in pieces]
        texts = [choice["delta"]["content"] if chat else choice["text"] for choice in choices]
        assert len(choices) > 2  # 60 tokens take 120 ms
        assert sum(len(choice["token_ids"]) for choice in choices) == 60 and len("".join(texts)) == 240
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert len({piece["id"] for piece in pieces}) == 1
        if chat:
            assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)

    served(test)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {}, "missing required field `prompt`"),
    ("completions", {"prompt": [1, -2]}, "Expected `int` >= 0 - at `$.prompt[1]`"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "Expected `int` >= 1 - at `$.max_tokens`"),
    ("completions", {"prompt": "a", "n": 2}, "Invalid enum value 2 - at `$.n`"),
    ("completions", {"prompt": "a", "echo": True}, "echo is true"),
    ("completions", {"prompt": [1] * 500, "max_tokens": 13}, "leaves room for 12 of 512: ask for fewer"),
    ("completions", {"prompt": [1] * 512}, "leaves no room to generate within max_model_len 512"),
    ("completions", {"prompt": []}, "a prompt has 1 token or more"),
    ("chat/completions", {"messages": []}, "Expected `array` of length >= 1 - at `$.messages`"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "Invalid enum value 'image_url' - at `$.messages[0].content[0].type`",
    ),
]


@pytest.mark.parametrize(("path", "body", "says"), REFUSED)
def test_what_cannot_be_emulated_is_refused(path: str, body: dict[str, Any], says: str) -> None:
    async def test(session: ClientSession, base: str, emulator: Emulator) -> None:
        status, answer = await post(session, f"{base}/{path}", body)
        assert status == answer["error"]["code"] == 400
        assert says in answer["error"]["message"]
        assert emulator.engines["e0"].running == emulator.engines["e0"].waiting == 0

    served(test)


def test_no_json_is_refused() -> None:
    async def test(session: ClientSession, base: str, _: Emulator) -> None:
        async with session.post(f"{base}/completions", data=b"{") as response:
            assert response.status == 400 and "truncated" in (await response.json())["error"]["message"]

    served(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_its_place(stream: bool) -> None:
    async def test(session: ClientSession, base: str, emulator: Emulator) -> None:
        engine = emulator.engines["e0"]

        async def ask(tokens: int) -> int:
            body = {"prompt": [tokens] * 9, "max_tokens": tokens, "stream": stream}
            async with session.post(f"{base}/completions", json=body) as response:
                await response.read()
                return response.status

        gone = [asyncio.create_task(ask(tokens)) for tokens in (400, 401, 402)]
        while (engine.running, engine.waiting) != (2, 1):
            await asyncio.sleep(0.005)
        for task in gone:
            task.cancel()
        assert await ask(10) == 200
        assert engine.generated_tokens == 10  # those who left were cut off
        assert (engine.running, engine.waiting) == (0, 0)

    served(test)


def test_several_engines_have_an_address_each() -> None:
    async def test(session: ClientSession, base: str, emulator: Emulator) -> None:
        async with session.get("/engines") as response:
            listed = (await response.json())["engines"]
        assert listed == [{"name": f"e{it}", "path": f"/engines/e{it}/v1"} for it in range(3)]
        # Four at a time would take twice as long on one engine.
        body = {"prompt": "a", "max_tokens": 30}
        answers = await asyncio.gather(*(post(session, f"/engines/e{it}/v1/completions", body) for it in range(3)))
        assert [status for status, _ in answers] == [200] * 3
        assert [engine.generated_tokens for engine in emulator.engines.values()] == [30] * 3
        for path, says in ((base, "there are 3 engines"), ("/engines/x/v1", "there is no engine 'x'")):
            status, answer = await post(session, f"{path}/completions", body)
            assert status == 404 and says in answer["error"]["message"]
        async with session.get("/engines/e1/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 512
        async with session.get("/health") as response:
            assert response.status == 200

    served(test, engines=3)


def test_metrics_have_vllms_names() -> None:
    async def test(session: ClientSession, base: str, _: Emulator) -> None:
        running = asyncio.create_task(post(session, f"{base}/completions", {"prompt": [1] * 17, "max_tokens": 100}))
        await asyncio.sleep(0.05)
        async with session.get("/metrics") as response:
            found = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        assert found['vllm:num_requests_running{engine="e0"}'] == "1.0"
        assert found['vllm:num_requests_waiting{engine="e0"}'] == "0.0"
        assert 0.01 <= float(found['vllm:kv_cache_usage_perc{engine="e0"}']) <= 0.1  # 3 to 15 of 200 blocks
        await running
        async with session.get("/metrics") as response:
            found = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        assert found['vllm:prompt_tokens_total{engine="e0"}'] == "17.0"
        assert found['vllm:generation_tokens_total{engine="e0"}'] == "100.0"
        assert found['vllm:num_requests_running{engine="e0"}'] == "0.0"

    served(test)
