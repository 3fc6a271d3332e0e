"""Endpoints with token ids, also behind the gateway: shapes, streams and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import ClientSession
from serve.stage import emulated, staged

PROMPT = list(range(2000, 2020))
TOKENS = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6}}
SGLANG = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}}


async def ask(session: ClientSession, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with session.post(path, json=body) as response:
        return response.status, await response.text()


def events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(it.removeprefix("data: ")) for it in text.split("\n\n")[:-2]]


async def test_vllms_endpoint_answers_with_token_ids() -> None:
    async with emulated("e0") as (base, _), ClientSession(base) as session:
        status, text = await ask(session, "/inference/v1/generate", TOKENS)
        (choice,) = json.loads(text)["choices"]
        assert status == 200 and len(choice["token_ids"]) == 6 and choice["finish_reason"] == "length"
        _, text = await ask(session, "/inference/v1/generate", TOKENS | {"stream": True})
        pieces = [it["choices"][0] for it in events(text)]
        assert sum(len(it["token_ids"]) for it in pieces) == 6
        assert [it["finish_reason"] for it in pieces] == [None] * (len(pieces) - 1) + ["length"]


async def test_sglangs_endpoint_counts_up_to_there() -> None:
    async with emulated("e0") as (base, _), ClientSession(base) as session:
        status, text = await ask(session, "/generate", SGLANG)
        said = json.loads(text)
        assert status == 200 and len(said["output_ids"]) == 6 and len(said["text"]) == 24
        assert said["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
        assert (said["meta_info"]["prompt_tokens"], said["meta_info"]["completion_tokens"]) == (20, 6)
        again = {"text": "a" * 40 + said["text"], "sampling_params": {"max_new_tokens": 2}, "stream": True}
        seen = [it["meta_info"] for it in events((await ask(session, "/generate", again))[1])]
        assert [it["completion_tokens"] for it in seen] == sorted(it["completion_tokens"] for it in seen)
        assert (seen[-1]["prompt_tokens"], seen[-1]["completion_tokens"]) == (16, 2)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/inference/v1/generate", {"token_ids": PROMPT}, "sampling_params"),
        ("/inference/v1/generate", {"token_ids": [1] * 512, "sampling_params": {}}, "no room"),
        ("/inference/v1/generate", TOKENS | {"sampling_params": {"n": 2}}, "n"),
        ("/generate", {"sampling_params": {}}, "text or input_ids"),
        ("/generate", SGLANG | {"text": "a"}, "text or input_ids"),
        ("/generate", {"input_ids": [PROMPT, PROMPT]}, "input_ids"),
    ],
)
async def test_what_cannot_be_served_is_refused(path: str, body: dict[str, Any], says: str) -> None:
    async with emulated("e0") as (base, _), ClientSession(base) as session:
        status, text = await ask(session, path, body)
        assert status == 400 and says in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"), [("/inference/v1/generate", TOKENS), ("/generate", SGLANG)], ids=["vllm", "sglang"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateway_counts_them(path: str, body: dict[str, Any], stream: bool) -> None:
    async with staged(engines=1) as stage:
        status, _ = await ask(stage.session, path, body | {"stream": stream, "libra": {"trajectory": "t"}})
        assert status == 200
        await stage.post("/trajectories/t/finish", {})
        (trajectory,) = stage.finished
        assert (trajectory.prompt_tokens, trajectory.generated_tokens) == (20, 6)
