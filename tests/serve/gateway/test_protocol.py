"""Requests of trainers and agents that know nothing of Libra: their sessions become trajectories."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from multidict import CIMultiDict
from serve.field_engine import GENERATED, PROMPT, STREAMS, WHOLE, FieldEngine
from serve.stage import Stage, staged

from libra.config.listeners import ID_LENGTH

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "what is it?"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "what is it?"},
    "/inference/v1/generate": {"token_ids": [5] * PROMPT, "sampling_params": {"max_tokens": 9}},
    "/generate": {"input_ids": [5] * PROMPT, "sampling_params": {"max_new_tokens": 9}},
    "/v1/responses": {"input": "what is it?"},
    "/v1/messages": CHAT | {"max_tokens": 9},
}


async def ask(
    stage: Stage, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, CIMultiDict[str], str]:
    async with stage.session.post(path, json=body, headers=headers) as response:
        return response.status, CIMultiDict(response.headers), await response.text()


# Names


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-Session-ID": "s"}, {}),
        ({"X-SMG-Routing-Key": "s"}, {}),
        ({}, {"metadata": {"session_id": "s", "other": "x"}}),
        ({"X-Session-ID": "other"}, {"libra": {"trajectory": "s"}}),
        ({"X-Session-ID": "s"}, {"metadata": {"session_id": "other"}}),
        ({"X-Session-ID": "s"}, {"metadata": None}),
    ],
)
@pytest.mark.parametrize("path", WHOLE)
async def test_a_session_is_a_trajectory_by_whatever_name_it_has(
    path: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    async with staged(engines=0, fields=[FieldEngine(), FieldEngine()]) as stage:
        for _ in range(3):
            status, _, text = await ask(stage, path, BODIES[path] | body, headers)
            assert status == 200, text
        assert sorted(engine.turns for engine in stage.gateway.upstreams.all.values()) == [0, 3]
        status, record = await stage.post("/finish_session?session_id=s", {})
        assert status == 200 and record == {"status": "ok", "session_id": "s", "turns": 3}
        (trajectory,) = stage.finished
        assert trajectory.prompt_tokens == PROMPT and trajectory.reward is None
        assert [turn.generated_tokens for turn in trajectory.turns] == [GENERATED] * 3


@pytest.mark.parametrize("path", STREAMS)
async def test_streams_of_every_shape_pass_and_count(path: str) -> None:
    async with staged(engines=0, fields=[FieldEngine()]) as stage:
        status, _, text = await ask(stage, path, BODIES[path] | {"stream": True}, {"X-Session-ID": "s"})
        assert status == 200
        kinds = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
        assert kinds == [kind for kind, _ in STREAMS[path] if kind is not None]
        assert text.count("data: ") == len(STREAMS[path])
        await stage.post("/finish_session?session_id=s", {})
        (trajectory,) = stage.finished
        assert (trajectory.prompt_tokens, trajectory.generated_tokens) == (PROMPT, GENERATED)
        assert stage.gateway.counts.turns == 1


MORE = {"role": "user", "content": "and then?"}
SAID = WHOLE["/v1/chat/completions"](None)["choices"][0]["message"]
LATER: dict[str, dict[str, Any]] = {  # prompts that go on with the answer to `BODIES`
    "/v1/chat/completions": {"messages": [*CHAT["messages"], SAID, MORE]},
    "/v1/completions": {"prompt": "what is it?abc and then?"},
    "/inference/v1/generate": {"token_ids": [*[5] * PROMPT, 7, 8, 9, 1]},
    "/generate": {"input_ids": [*[5] * PROMPT, 7, 8, 9, 1]},
    "/v1/messages": {
        "messages": [*CHAT["messages"], {"role": "assistant", "content": WHOLE["/v1/messages"](None)["content"]}, MORE]
    },
}


@pytest.mark.parametrize(
    ("path", "stream"),
    [(path, False) for path in LATER] + [(path, True) for path in LATER if path in STREAMS],
)
async def test_a_prompt_that_goes_on_with_an_answer_is_the_next_turn(path: str, stream: bool) -> None:
    async with staged(engines=0, fields=[FieldEngine()]) as stage:
        streamed = {"stream": True} if stream else {}
        for prompt in ({}, {}, LATER[path]):  # two samples of one prompt, then one of them goes on
            status, _, text = await ask(stage, path, BODIES[path] | prompt | streamed)
            assert status == 200, text
        assert len(stage.gateway.trajectories) == len(stage.gateway.sessions.unnamed) == 2
        ids = {call.trajectory_id for call in stage.policy.calls if hasattr(call, "trajectory_id")}
        for id in ids:
            await stage.post(f"/trajectories/{id}/finish", {})
        assert sorted(len(trajectory.turns) for trajectory in stage.finished) == [1, 2]


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({"X-Session-ID": ""}, {}, "the header X-Session-ID must have 1 to 512 printable characters"),
        ({"X-Session-ID": "x" * (ID_LENGTH + 1)}, {}, "the header X-Session-ID must have 1 to 512"),
        ({}, {"metadata": {"session_id": 7}}, "metadata: Expected `str | null`, got `int`"),
        ({}, {"metadata": {"session_id": "s", "more": "x" * 70_000}}, "metadata: more than 65536 bytes"),
        ({"X-Session-ID": "s"}, {"n": 4}, "trajectory s: the request asks for 4 samples"),
        ({}, {"n": 4, "libra": {"trajectory": "s"}}, "trajectory s: the request asks for 4 samples"),
    ],
)
async def test_a_session_that_makes_no_sense_is_refused(
    headers: dict[str, str], body: dict[str, Any], says: str
) -> None:
    async with staged(engines=0, fields=[FieldEngine()]) as stage:
        status, _, text = await ask(stage, "/v1/chat/completions", CHAT | body, headers)
        assert status == 400 and says in json.loads(text)["error"]["message"]
        assert len(stage.gateway.trajectories) == 0


async def test_a_second_turn_at_a_time_is_one_of_its_own() -> None:
    async with staged(engines=2) as stage:
        body = {"prompt": [1] * 9, "max_tokens": 50}
        asked = [asyncio.create_task(ask(stage, "/v1/completions", body, {"X-Session-ID": "s"})) for _ in range(3)]
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 3
        await stage.post("/finish_session?session_id=s", {})
        (trajectory,) = stage.finished
        assert [turn.generated_tokens for turn in trajectory.turns] == [50]
        assert stage.gateway.counts.turns == 3 and len(stage.gateway.trajectories) == 0


async def test_several_samples_without_a_name_are_one_turn_of_their_own() -> None:
    async with staged(engines=0, fields=[FieldEngine()]) as stage:
        assert (await ask(stage, "/v1/chat/completions", CHAT | {"n": 4}))[0] == 200
        assert len(stage.gateway.trajectories) == 0 and stage.gateway.counts.generated_tokens == GENERATED


async def test_the_name_of_a_tool_is_that_of_its_call() -> None:
    async with staged(engines=0, fields=[FieldEngine()]) as stage:
        _, _, text = await ask(stage, "/v1/chat/completions", CHAT, {"X-Session-ID": "s"})
        message = json.loads(text)["choices"][0]["message"]
        returned = {"role": "tool", "tool_call_id": "c1", "content": "four"}
        longer = {"messages": [*CHAT["messages"], message, returned]}
        await ask(stage, "/v1/chat/completions", longer, {"X-Session-ID": "s"})
        _, told = stage.policy.calls[-1]
        assert (told.tool, told.status) == ("look", "unknown")
        await ask(stage, "/v1/chat/completions", longer, {"X-Session-ID": "s"})
        await stage.post("/finish_session?session_id=s", {})
        assert [turn.tool for turn in stage.finished[0].turns] == ["look", "look", None]


async def test_the_end_of_an_unknown_session_is_no_error() -> None:
    async with staged(engines=0, fields=[FieldEngine()]) as stage:
        status, said = await stage.post("/finish_session?session_id=unknown", {})
        assert status == 200 and said["status"] == "ok" and said["turns"] == 0
        for headers in ({}, {"X-Session-ID": "s"}):
            async with stage.session.post("/finish_session", headers=headers) as response:
                assert response.status == 400
                assert "/finish_session?session_id=ID" in (await response.json())["error"]["message"]
        assert stage.finished == []


async def test_a_session_ends_with_the_version_that_is_known() -> None:
    async with staged(engines=0, fields=[FieldEngine()]) as stage:
        for id in ("a", "b"):
            await ask(stage, "/v1/chat/completions", CHAT, {"X-Session-ID": id})
        await stage.post("/trajectories/a/finish", {"policy_version": 5})
        await stage.post("/finish_session?session_id=b", {})
        assert [trajectory.policy_version for trajectory in stage.finished] == [5, 5]


async def test_the_trajectories_of_a_client_with_headers_only_are_its_trace() -> None:
    drawn = random.Random(5)
    trace: dict[str, list[tuple[int, int]]] = {f"s{number}": [] for number in range(12)}  # context, generated

    async with staged(engines=3) as stage:

        async def session(name: str) -> None:
            prompt, headers = [drawn.randrange(9) for _ in range(drawn.randrange(5, 60))], {"X-Session-ID": name}
            for _ in range(drawn.randrange(1, 6)):
                body: dict[str, Any] = {"prompt": prompt, "max_tokens": drawn.randrange(1, 20)}
                body["return_token_ids"] = True
                status, _, text = await ask(stage, "/v1/completions", body, headers)
                assert status == 200
                generated = json.loads(text)["choices"][0]["token_ids"]
                trace[name].append((len(prompt), len(generated)))
                prompt = [*prompt, *generated, *(drawn.randrange(9) for _ in range(drawn.randrange(1, 20)))]
            async with stage.session.post("/finish_session", params={"session_id": name}) as response:
                assert response.status == 200

        await asyncio.gather(*map(session, trace))
        assert len(stage.finished) == len(trace) and len(stage.gateway.trajectories) == 0
        for trajectory in stage.finished:
            turns = zip(trajectory.contexts(), trajectory.turns, strict=True)
            assert [(context, turn.generated_tokens) for context, turn in turns] == trace[trajectory.id]


# Headers


async def test_the_id_of_a_request_passes_both_ways() -> None:
    engine = FieldEngine()
    async with staged(engines=0, fields=[engine]) as stage:
        sent = {"X-Request-Id": "r-1", "traceparent": "00-a-b-01", "tracestate": "x=1", "X-Other": "no"}
        _, headers, _ = await ask(stage, "/v1/chat/completions", CHAT, sent)
        arrived = engine.asked[0].headers
        assert {name: arrived.get(name) for name in sent} == sent | {"X-Other": None}
        assert headers["X-Request-Id"] == "of the engine"
        await stage.session.get("/v1/models")
        engine.status = 400  # its error does not name the request
        _, headers, _ = await ask(stage, "/v1/chat/completions", CHAT, {"X-Request-Id": "r-2"})
        assert headers["X-Request-Id"] == "r-2"


# What goes to one engine


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_what_any_engine_can_answer_is_asked_of_one(path: str) -> None:
    engines = [FieldEngine(), FieldEngine()]
    async with staged(engines=0, fields=engines) as stage:
        status, said = await stage.post(path, {"prompt": "a"})
        assert status == 200 and said == {"path": path}
        assert [len(engine.asked) for engine in engines] == [1, 0] and engines[0].asked[0].body == {"prompt": "a"}
        assert len(stage.gateway.trajectories) == 0 and stage.gateway.counts.turns == 0
        engines[0].control = 503
        assert (await stage.post(path, {"prompt": "a"}))[0] == 200
        engines[1].control = 400
        assert (await stage.post(path, {"prompt": 7}))[0] == 400


async def test_the_plan_says_what_is_routed_by() -> None:
    async with staged(engines=0, fields=[FieldEngine()], idle_seconds=60.0) as stage:
        for id in ("a", "b"):
            await ask(stage, "/v1/chat/completions", CHAT, {"X-Session-ID": id})
            await stage.post(f"/trajectories/{id}/finish", {})
        async with stage.session.get("/plan") as response:
            plan = await response.json()
        (engine,) = plan["engines"]
        assert engine["name"] == "f0" and engine["max_model_len"] == 4096 and engine["bucket"] == 0
        assert plan["limits"] == [4096] and plan["route"] == "cmlfq" and plan["turn_tokens"] == 16
        lengths = plan["lengths"]
        assert (lengths["finished"], lengths["unfinished"]) == (2, 0)
        assert sum(found["share"] for found in lengths["classes"]) == pytest.approx(1)
        assert lengths["classes"][0]["peak_context"] >= PROMPT + GENERATED
