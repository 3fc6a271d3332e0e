"""The server over a socket: shapes, streams, refusals, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st
from serve.stage import emulated

from libra.serve.emulate.server import Emulator, PrefixIndex
from libra.sim.engine.block_pool import BlockPool
from libra.sim.engine.request import Chain, owner_of

DEFAULT = 7


@asynccontextmanager
async def served(engines: int = 1) -> AsyncIterator[tuple[ClientSession, Emulator]]:
    names = [f"e{it}" for it in range(engines)]
    async with (
        emulated(*names, default_tokens=DEFAULT, max_num_seqs=2) as (base, emulator),
        ClientSession(base) as session,
    ):
        yield session, emulator


async def post(session: ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


async def events(session: ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    async with session.post(path, json=body | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


async def test_a_completion_has_the_tokens_that_were_asked_for_when_they_are_there() -> None:
    async with served() as (session, _):
        began = time.monotonic()
        status, answer = await post(
            session,
            "/v1/completions",
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


@pytest.mark.parametrize("as_text", [False, True])
async def test_a_later_turn_finds_the_earlier_one_in_the_cache(as_text: bool) -> None:
    async with served() as (session, _):
        prompt: Any = "what is the answer to this one? " if as_text else list(range(8))
        _, first = await post(
            session, "/v1/completions", {"prompt": prompt, "max_tokens": 17, "return_token_ids": True}
        )
        (choice,) = first["choices"]
        longer = prompt + (choice["text"] + "and?" if as_text else [*choice["token_ids"], 5])
        _, second = await post(session, "/v1/completions", {"prompt": longer, "max_tokens": 1})
        assert second["usage"]["prompt_tokens"] == 8 + 17 + 1
        # The last token that was generated is in no cache, so that of 25 tokens 24 are found: three blocks of eight.
        assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 24}
        _, salted = await post(session, "/v1/completions", {"prompt": longer, "max_tokens": 1, "cache_salt": "x"})
        assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_chat_without_max_tokens_ends_by_itself() -> None:
    async with served() as (session, _):
        messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": [{"type": "text", "text": "!"}]}]
        _, answer = await post(session, "/v1/chat/completions", {"messages": messages, "temperature": 0.3})
        (choice,) = answer["choices"]
        assert answer["object"] == "chat.completion" and choice["finish_reason"] == "stop"
        assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 4 * DEFAULT
        assert answer["usage"]["completion_tokens"] == DEFAULT


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_has_all_tokens_once(chat: bool) -> None:
    async with served() as (session, _):
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": "hello"}
        asked |= {"max_tokens": 60, "stream_options": {"include_usage": True}, "return_token_ids": True}
        *pieces, usage = await events(session, f"/v1/{'chat/' * chat}completions", asked)
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 60
        choices = [piece["choices"][0] for piece in pieces]
        texts = [choice["delta"]["content"] if chat else choice["text"] for choice in choices]
        assert len(choices) > 2  # 60 tokens take 120 ms
        assert sum(len(choice["token_ids"]) for choice in choices) == 60 and len("".join(texts)) == 240
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert len({piece["id"] for piece in pieces}) == 1
        if chat:
            assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)


async def test_the_ids_of_a_chat_are_where_vllm_has_them() -> None:
    messages = [{"role": "user", "content": "a text \U0001f600 of ours, with rare characters \u4f60"}]
    async with served() as (session, _):
        asked: dict[str, Any] = {"messages": messages, "max_tokens": 30, "return_token_ids": True}
        _, answer = await post(session, "/v1/chat/completions", asked)
        (choice,) = answer["choices"]
        prompt = answer["prompt_token_ids"]
        assert len(prompt) == answer["usage"]["prompt_tokens"] and all(1000 <= token < 151_936 for token in prompt)
        assert len(choice["token_ids"]) == 30 and max(choice["token_ids"]) < 1000 and "prompt_token_ids" not in choice
        pieces = await events(session, "/v1/chat/completions", asked)
        assert [piece.get("prompt_token_ids") for piece in pieces] == [prompt] + [None] * (len(pieces) - 1)
        assert all("prompt_token_ids" not in piece["choices"][0] for piece in pieces)
        completion = asked | {"prompt": "a"}
        del completion["messages"]
        first, *_ = await events(session, "/v1/completions", completion)
        assert "prompt_token_ids" in first["choices"][0] and "prompt_token_ids" not in first


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {}, "missing required field `prompt`"),
    ("completions", {"prompt": [1, -2]}, "Expected `int` >= 0 - at `$.prompt[1]`"),
    ("completions", {"prompt": "a", "max_tokens": 0}, "Expected `int` >= 1 - at `$.max_tokens`"),
    ("completions", {"prompt": "a", "n": 2}, "Invalid enum value 2 - at `$.n`"),
    ("completions", {"prompt": "a", "echo": True}, "echo: true"),
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
async def test_what_cannot_be_emulated_is_refused(path: str, body: dict[str, Any], says: str) -> None:
    async with served() as (session, emulator):
        status, answer = await post(session, f"/v1/{path}", body)
        assert status == answer["error"]["code"] == 400
        assert says in answer["error"]["message"]
        assert emulator.engines["e0"].running == emulator.engines["e0"].waiting == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_leaves_its_place(stream: bool) -> None:
    async with served() as (session, emulator):
        engine = emulator.engines["e0"]

        async def ask(tokens: int) -> int:
            body = {"prompt": [tokens] * 9, "max_tokens": tokens, "stream": stream}
            async with session.post("/v1/completions", json=body) as response:
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


async def test_several_engines_have_an_address_each() -> None:
    async with served(engines=3) as (session, emulator):
        async with session.get("/engines") as response:
            listed = (await response.json())["engines"]
        assert listed == [{"name": f"e{it}", "path": f"/engines/e{it}/v1"} for it in range(3)]
        # Four at a time would take twice as long on one engine.
        body = {"prompt": "a", "max_tokens": 30}
        answers = await asyncio.gather(*(post(session, f"/engines/e{it}/v1/completions", body) for it in range(3)))
        assert [status for status, _ in answers] == [200] * 3
        assert [engine.generated_tokens for engine in emulator.engines.values()] == [30] * 3
        for path, says in (("/v1", "there are 3 engines"), ("/engines/x/v1", "there is no engine 'x'")):
            status, answer = await post(session, f"{path}/completions", body)
            assert status == 404 and says in answer["error"]["message"]
        async with session.get("/engines/e1/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 512
        async with session.get("/health") as response:
            assert response.status == 200


async def test_metrics_have_vllms_names() -> None:
    async with served() as (session, _):
        running = asyncio.create_task(post(session, "/v1/completions", {"prompt": [1] * 17, "max_tokens": 100}))
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


BLOCK = 4
_contexts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=10), st.sampled_from("ab")
    ),
    max_size=12,
)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens of the full blocks in which they are equal from the beginning."""
    shared = 0
    while shared + BLOCK <= min(len(one), len(other)) and one[: shared + BLOCK] == other[: shared + BLOCK]:
        shared += BLOCK
    return shared


@given(_contexts)
def test_a_chain_shares_what_is_equal_with_any_context_before_and_no_more(
    contexts: list[tuple[list[int], list[int], str]],
) -> None:
    index, seen = PrefixIndex(BLOCK, 10_000), []
    for prompt, answer, salt in contexts:
        chain = index.chain(prompt, salt)
        expected = max((common(prompt, other) for other, its_salt in seen if its_salt == salt), default=0)
        assert chain.fork == expected
        index.learn(chain, [*prompt, *answer], salt)
        seen += [(prompt, salt), ([*prompt, *answer], salt)]


@given(_contexts)
def test_blocks_with_one_owner_have_equal_tokens(contexts: list[tuple[list[int], list[int], str]]) -> None:
    """As the simulator's cache takes them for the same."""
    index, pool = PrefixIndex(BLOCK, 10_000), BlockPool(100, BLOCK, True)
    tokens_of: dict[tuple[object, int], tuple[str, list[int]]] = {}
    for prompt, answer, salt in contexts:
        chain = index.chain(prompt, salt)
        context = [*prompt, *answer]
        index.learn(chain, context, salt)
        path = pool.path(chain)
        for block in range(len(context) // BLOCK):
            owner = owner_of(path, block)
            known = tokens_of.setdefault((owner, block), (salt, context[: (block + 1) * BLOCK]))
            assert known == (salt, context[: (block + 1) * BLOCK])


def test_what_was_seen_last_is_remembered() -> None:
    index = PrefixIndex(BLOCK, 6)
    first, second = list(range(12)), list(range(100, 112))
    index.chain(first)
    index.chain(second)
    assert len(index) == 6
    index.chain(first)  # once more, so that the second is the older one
    index.chain([200, 201, 202, 203])
    assert len(index) == 6
    assert index.chain([*first, 1]).fork == 12
    assert index.chain([*second, 1]).fork == 0  # its beginning was forgotten, so that the rest is never found
    assert isinstance(index.chain([]), Chain)


async def test_each_engine_has_metrics_of_its_own() -> None:
    async with served(2) as (session, _):
        async with session.get("/engines/e1/metrics") as response:
            own = await response.text()
        assert 'vllm:num_requests_waiting{engine="e1"} 0.0' in own and '"e0"' not in own
        for path, status in (("/engines/e0/health", 200), ("/engines/e9/health", 404), ("/engines/e9/metrics", 404)):
            async with session.get(path) as response:
                assert response.status == status
