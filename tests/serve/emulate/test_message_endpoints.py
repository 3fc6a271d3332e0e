"""Responses and messages of text, also behind the gateway: shapes, streams and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import ClientSession
from serve.stage import emulated, staged

RESPONSE = {"input": "a" * 16, "instructions": "b" * 8, "max_output_tokens": 6}
MESSAGE = {"messages": [{"role": "user", "content": "a" * 16}], "system": "b" * 8, "max_tokens": 6}
TOKENS = 2 + 2 + 2 + 4 + 3  # of roles, instructions, text, and the answer's role


async def ask(session: ClientSession, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with session.post(path, json=body) as response:
        return response.status, await response.text()


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for each in text.removesuffix("\n\n").split("\n\n"):
        kind, data = each.split("\n")
        found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(kind == said["type"] for kind, said in found)
    return found


async def test_a_response_is_one_message() -> None:
    async with emulated("e0") as (base, _), ClientSession(base) as session:
        status, text = await ask(session, "/v1/responses", RESPONSE)
        whole = json.loads(text)
        assert status == 200 and whole["status"] == "incomplete"
        assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (TOKENS, 6)
        assert len(whole["output"][0]["content"][0]["text"]) == 24
        _, text = await ask(session, "/v1/responses", RESPONSE | {"stream": True})
        said = events(text)
        deltas = "".join(it["delta"] for kind, it in said if kind == "response.output_text.delta")
        assert (said[0][0], said[-1][0]) == ("response.created", "response.completed")  # as vLLM, also where it is cut
        assert said[-1][1]["response"]["output"][0]["content"][0]["text"] == deltas and len(deltas) == 24
        assert [it["sequence_number"] for _, it in said] == list(range(len(said)))
        _, text = await ask(session, "/v1/responses", {"input": "a"})
        assert json.loads(text)["status"] == "completed"


async def test_a_message_is_one_block_of_text() -> None:
    async with emulated("e0") as (base, _), ClientSession(base) as session:
        status, text = await ask(session, "/v1/messages", MESSAGE)
        whole = json.loads(text)
        assert status == 200 and whole["stop_reason"] == "max_tokens" and len(whole["content"][0]["text"]) == 24
        assert whole["usage"] == {"input_tokens": TOKENS, "cache_read_input_tokens": 0, "output_tokens": 6}
        _, text = await ask(session, "/v1/messages", MESSAGE | {"stream": True})
        said = events(text)
        assert said[0][0] == "message_start" and [kind for kind, _ in said[-3:]] == [
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        usage = said[-2][1]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == TOKENS and usage["output_tokens"] == 6
        assert usage["cache_read_input_tokens"] == 8  # the first request's prompt: a block of eight tokens


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/responses", RESPONSE | {"tools": [{"type": "function"}]}, "tools"),
        ("/v1/responses", RESPONSE | {"previous_response_id": "r"}, "previous_response_id"),
        ("/v1/responses", {"input": "a" * 4096}, "no room"),
        ("/v1/messages", {"messages": MESSAGE["messages"]}, "max_tokens"),
        ("/v1/messages", MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ],
)
async def test_what_cannot_be_served_is_refused(path: str, body: dict[str, Any], says: str) -> None:
    async with emulated("e0") as (base, _), ClientSession(base) as session:
        status, text = await ask(session, path, body)
        assert status == 400 and says in json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)], ids=["responses", "messages"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateway_counts_them(path: str, body: dict[str, Any], stream: bool) -> None:
    async with staged(engines=1) as stage:
        status, _ = await ask(stage.session, path, body | {"stream": stream, "libra": {"trajectory": "t"}})
        assert status == 200
        await stage.post("/trajectories/t/finish", {})
        (trajectory,) = stage.finished
        assert (trajectory.prompt_tokens, trajectory.generated_tokens) == (TOKENS, 6)
