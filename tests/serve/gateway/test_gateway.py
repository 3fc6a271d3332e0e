"""The gateway over sockets, in front of emulated engines."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest
from aiohttp import web
from fakes.dashboards import asked_by_dashboard
from serve.stage import Scripted, staged

from libra.route.policy import ToolReturn, TurnRequest
from libra.serve.emulate.server import Emulator
from libra.serve.gateway import health
from libra.trajectory import Trajectory, Turn


async def test_the_policy_is_told_what_happened_and_learns_the_trajectory() -> None:
    async with staged() as stage:
        libra: dict[str, Any] = {"trajectory": "t", "prompt": "p", "task": "search"}
        first = {"prompt": [1] * 40, "max_tokens": 20, "return_token_ids": True, "libra": libra}
        status, answer = await stage.post("/v1/completions", first)
        assert status == 200 and len(answer["choices"][0]["token_ids"]) == 20
        tool = {"name": "lookup", "status": "error"}
        second = first | {"prompt": [1] * 75, "max_tokens": 9, "libra": libra | {"tool": tool}}
        assert (await stage.post("/v1/completions", second))[0] == 200
        status, record = await stage.post("/trajectories/t/finish", {"reward": 0.5, "policy_version": 3})
        assert status == 200
        placed, (asked, returned), learned = (it for it in stage.policy.calls if it != "forget t")
        assert placed == TurnRequest("t", "p", 40, 40, "search")
        assert asked == TurnRequest("t", "p", 40, 75, "search") and returned == ToolReturn("lookup", "error", 15)
        seconds = learned.turns[0].tool_seconds
        assert 0 <= seconds < 1 and learned.started_at > 0
        turns = (Turn(20, "lookup", "error", 15, seconds), Turn(9, None, None, 0))
        assert learned == Trajectory("t", "p", "search", 40, turns, 0.5, 3, True, learned.started_at)
        assert stage.finished == [learned] and record["turns"][0]["generated_tokens"] == 20
        assert len(stage.gateway.trajectories) == 0
        assert (await stage.post("/trajectories/t/finish", {}))[0] == 404


async def test_text_is_counted_by_the_engine() -> None:
    async with staged() as stage:
        libra = {"trajectory": "t"}
        messages = [{"role": "user", "content": "what is it? "}]
        _, answer = await stage.post("/v1/chat/completions", {"messages": messages, "libra": libra})
        messages += [answer["choices"][0]["message"], {"role": "tool", "content": "four hundred and two"}]
        tool = {"name": "calculator", "returned_tokens": 7}
        body = {"messages": messages, "libra": libra | {"tool": tool}}
        _, second = await stage.post("/v1/chat/completions", body)
        await stage.post("/trajectories/t/finish", {})
        (trajectory,) = stage.finished
        assert trajectory.prompt_tokens == answer["usage"]["prompt_tokens"]
        assert trajectory.turns[0].returned_tokens == 7 and trajectory.turns[0].status == "unknown"
        assert [turn.generated_tokens for turn in trajectory.turns] == [10, 10]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # it went where its prefix is


async def test_turns_without_a_name_leave_no_load() -> None:
    async with staged() as stage:
        answers = await asyncio.gather(*(stage.post("/v1/completions", {"prompt": [it] * 9}) for it in range(6)))
        assert [status for status, _ in answers] == [200] * 6
        assert len(stage.gateway.trajectories) == len(stage.gateway.sessions.unnamed) == 6
        assert [engine.turns for engine in stage.gateway.upstreams.all.values()] == [3, 3]
        assert all(it.load_tokens == it.in_flight == 0 for it in stage.gateway.upstreams.all.values())


@pytest.mark.parametrize("asked", [False, True])
async def test_a_stream_passes_event_by_event(asked: bool) -> None:
    async with staged() as stage:
        body: dict[str, Any] = {"prompt": [5] * 30, "max_tokens": 60, "stream": True, "libra": {"trajectory": "t"}}
        if asked:
            body["stream_options"] = {"include_usage": True}
        began, came = time.monotonic(), []
        async with stage.session.post("/v1/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            text = b""
            async for chunk in response.content.iter_any():
                text += chunk
                came.append(time.monotonic() - began)
        events = text.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        pieces = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert [piece["choices"] == [] for piece in pieces] == [False] * (len(pieces) - asked) + [True] * asked
        assert sum(len(piece["choices"][0]["text"]) for piece in pieces if piece["choices"]) == 240
        assert len(came) > 1 and came[-1] >= 0.12  # 60 tokens take 120 ms
        await stage.post("/trajectories/t/finish", {})
        assert stage.finished[0].prompt_tokens == 30 and stage.finished[0].generated_tokens == 60


async def test_the_policys_order_reaches_engines_that_are_to_know_it() -> None:
    async with staged(engines=1, priorities=True) as stage:
        seen = []
        emulator = stage.emulators["e0"]
        submit = emulator.engines["e0"].submit
        emulator.engines["e0"].submit = lambda *of: seen.append(of[3]) or submit(*of)  # type: ignore[method-assign,func-returns-value]
        for own in ({}, {"priority": 2}):
            await stage.post("/v1/completions", {"prompt": [5] * 30, **own})
        assert seen == [-7, 2]


async def test_turns_of_an_engine_that_goes_away_are_asked_again_elsewhere() -> None:
    async with staged() as stage:
        body = {"prompt": [5] * 30, "max_tokens": 200}
        turns = [
            asyncio.create_task(stage.post("/v1/completions", body | {"libra": {"trajectory": str(it)}}))
            for it in range(6)
        ]
        while stage.emulators["e0"].engines["e0"].running < 3:
            await asyncio.sleep(0.005)
        await stage.stops["e0"]()
        stopped = time.monotonic()
        answers = await asyncio.gather(*turns)
        assert [status for status, _ in answers] == [200] * 6
        assert time.monotonic() - stopped < 2.0  # of which 0.4 s are the turn itself
        assert stage.policy.calls.count("gone e0") == 1 and stage.gateway.counts.retries == 3
        assert [it.id for it in stage.gateway.upstreams.instances] == ["e1"]
        for it in range(6):
            assert (await stage.post(f"/trajectories/{it}/finish", {}))[0] == 200
        assert [len(trajectory.turns) for trajectory in stage.finished] == [1] * 6


async def test_a_stream_that_breaks_off_says_so() -> None:
    async with staged(engines=1) as stage:
        body = {"prompt": [5] * 30, "max_tokens": 400, "stream": True, "libra": {"trajectory": "t"}}
        async with stage.session.post("/v1/completions", json=body) as response:
            await response.content.readany()
            await stage.stops["e0"]()
            text = (await response.read()).decode()
        last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == 503 and "engine e0 was lost" in last["error"]["message"]
        assert "gone e0" in stage.policy.calls
        assert (await stage.post("/trajectories/t/finish", {}))[0] == 400  # its turn has no answer


async def test_without_engines_a_turn_waits_and_is_refused() -> None:
    async with staged(engines=1, wait_seconds=0.3) as stage:
        await stage.stops["e0"]()
        began = time.monotonic()
        status, answer = await stage.post("/v1/completions", {"prompt": [1] * 9, "libra": {"trajectory": "t"}})
        assert status == 503 and "no engine is healthy" in answer["error"]["message"]
        assert 0.3 <= time.monotonic() - began < 5
        async with stage.session.get("/health") as response:
            assert response.status == 503


async def test_a_turn_waits_until_an_engine_comes_back() -> None:
    async with staged(engines=1) as stage:
        stage.mark("e0", healthy=False)
        turn = asyncio.create_task(stage.post("/v1/completions", {"prompt": [1] * 9}))
        await asyncio.sleep(0.05)
        assert not turn.done() and stage.engine("e0").in_flight == 0
        stage.mark("e0", healthy=True)
        assert (await turn)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_generates_is_well_though_it_says_so_late(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(health, "_CHECK_TIMEOUT", 1.0)
    monkeypatch.setattr(health, "_CHECK_SECONDS", 0.01)
    looks: list[str] = []

    async def late(emulator: Emulator, _: web.Request) -> web.Response:
        looks.append("late")
        if len(looks) > 1:
            await asyncio.sleep(60)
        return web.Response()

    monkeypatch.setattr(Emulator, "_health", late)

    async with staged(engines=1) as stage:
        body = {"prompt": [5] * 9, "max_tokens": 450 if stream else 2, "stream": stream}
        async with asyncio.timeout(30):
            while len(looks) < 3:  # the second one came to its end
                async with stage.session.post("/v1/completions", json=body) as response:
                    assert response.status == 200 and await response.read()
            assert "gone e0" not in stage.policy.calls
            while "gone e0" not in stage.policy.calls:  # now it does nothing at all
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_engine_and_loses_none(stream: bool) -> None:
    async with staged(engines=1) as stage:
        engine = stage.emulators["e0"].engines["e0"]
        body = {"prompt": [5] * 30, "max_tokens": 400, "stream": stream, "libra": {"trajectory": "t"}}
        turn = asyncio.create_task(stage.post("/v1/completions", body))
        while not engine.running:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        turn.cancel()
        while engine.running:
            await asyncio.sleep(0.005)
        assert engine.generated_tokens == 0  # of turns that have ended: this one was cut off
        assert len(stage.gateway.upstreams.instances) == 1
        assert (await stage.post("/v1/completions", body | {"max_tokens": 5, "stream": False}))[0] == 200
        await stage.post("/trajectories/t/finish", {})
        assert stage.finished[0].generated_tokens == 5


async def test_idle_trajectories_are_given_up_as_lower_bounds() -> None:
    async with staged(engines=1, idle_seconds=0.1) as stage:
        await stage.post("/v1/completions", {"prompt": [1] * 9, "libra": {"trajectory": "t"}})
        assert len(stage.gateway.trajectories) == 1
        began = time.monotonic()
        while len(stage.gateway.trajectories):
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.02)
        assert stage.policy.calls[-1] == "forget t" and stage.gateway.counts.forgotten == 1
        (bound,) = stage.finished
        assert not bound.finished and bound.reward is None and abs(bound.started_at - time.time()) < 60
        assert [turn.generated_tokens for turn in bound.turns] == [10]
        assert stage.gateway.lengths.summary()["unfinished"] == 1


REFUSED: list[tuple[str, dict[str, Any] | list[int], int, str]] = [
    ("/v1/completions", [1], 400, "Expected `object`, got `array`"),
    ("/v1/completions", {"prompt": "a", "stream": 1}, 400, "Expected `bool | null`, got `int` - at `$.stream`"),
    ("/v1/completions", {"prompt": "a", "libra": {}}, 400, "missing required field `trajectory`"),
    ("/v1/completions", {"prompt": "a", "libra": {"trajectory": "t", "toll": 1}}, 400, "unknown field `toll`"),
    (
        "/v1/completions",
        {"prompt": "a", "libra": {"trajectory": "t", "tool": {"name": "x", "status": "bad"}}},
        400,
        "Invalid enum value 'bad' - at `$.libra.tool.status`",
    ),
    (
        "/v1/completions",
        {"prompt": [1] * 500, "max_tokens": 13},
        400,
        "a prompt of 500 tokens with max_tokens 13 exceeds the",
    ),
    ("/v1/completions", {"prompt": "a", "n": 2}, 400, "Invalid enum value 2 - at `$.n`"),  # the engine's own words
    ("/trajectories/t/finish", {}, 404, "trajectory t is unknown"),
    ("/trajectories/t/forget", {}, 404, "trajectory t is unknown"),
    ("/trajectories/t/finish", {"reward": "good"}, 400, "Expected `float | null`, got `str` - at `$.reward`"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED)
async def test_what_makes_no_sense_is_refused(path: str, body: Any, status: int, says: str) -> None:
    async with staged(engines=1, turn_tokens=1) as stage:
        found, answer = await stage.post(path, body)
        assert found == status == answer["error"]["code"] and says in answer["error"]["message"]


# (what is asked, how long turns are said to be, status, what is said): the engine holds 512 tokens
ROOM: list[tuple[dict[str, Any], int, int, str]] = [
    ({"prompt": [1] * 500, "max_tokens": 5}, 1024, 200, ""),  # the body knows better than the file
    ({"prompt": [1] * 500}, 1024, 200, ""),
    ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5, "max_tokens": 9999}, 1, 200, ""),
    (
        {"prompt": [1] * 512},
        1,
        400,
        "a prompt of 512 tokens with max_tokens 1 exceeds the longest context of any engine",
    ),
    (
        {"prompt": "a", "max_tokens": 512},
        1,
        400,
        "a prompt with max_tokens 512 exceeds the longest context of any engine",
    ),
    ({"prompt": "abcd" * 512}, 1, 400, "leaves no room to generate within max_model_len 512"),  # the engine counts text
    ({"prompt": "abcd" * 400, "max_tokens": 200}, 1, 400, "leaves room for 112 of 512"),
]


@pytest.mark.parametrize(("body", "turn_tokens", "status", "says"), ROOM)
async def test_a_turn_needs_the_room_that_it_asks_for(
    body: dict[str, Any], turn_tokens: int, status: int, says: str
) -> None:
    async with staged(engines=1, turn_tokens=turn_tokens) as stage:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        async with asyncio.timeout(10):  # far less than wait_seconds
            found, answer = await stage.post(path, body)
        assert found == status and (not says or says in answer["error"]["message"])


async def test_one_turn_of_a_trajectory_at_a_time() -> None:
    async with staged() as stage:
        body = {"prompt": [1] * 9, "max_tokens": 50, "libra": {"trajectory": "t"}}
        first = asyncio.create_task(stage.post("/v1/completions", body))
        await asyncio.sleep(0.05)
        status, answer = await stage.post("/v1/completions", body)
        assert status == 400 and "a turn is in flight" in answer["error"]["message"]
        assert (await first)[0] == 200
        assert (await stage.post("/trajectories/t/forget", {})) == (204, None)
        assert stage.policy.calls[-1] == "forget t"


async def test_engines_and_metrics_can_be_seen() -> None:
    async with staged() as stage:
        await stage.post("/v1/completions", {"prompt": [1] * 9, "max_tokens": 5})
        await stage.stops["e1"]()
        stage.mark("e1", healthy=False)
        async with stage.session.get("/engines") as response:
            listed = await response.json()
        assert listed["route"] == "cmlfq" and listed["limits"] == [512]
        assert [(it["name"], it["healthy"]) for it in listed["engines"]] == [("e0", True), ("e1", False)]
        async with stage.session.get("/metrics") as response:
            found = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        assert found["libra_gateway_turns_total"] == "1.0" and found["libra_gateway_generated_tokens_total"] == "5.0"
        assert found['libra_gateway_engine_healthy{engine="e1"}'] == "0.0"
        assert asked_by_dashboard("gateway") <= {name.partition("{")[0] for name in found}
        async with stage.session.get("/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "e0"


# Who asks


async def answer(writer: asyncio.StreamWriter) -> None:
    body = b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize(
    ("own", "sent"),
    [({}, "Bearer client"), ({"api_key": "engine"}, "Bearer engine"), ({"basic_auth": "me:pw"}, "Basic bWU6cHc=")],
)
async def test_an_engine_hears_its_own_token_or_the_clients(own: dict[str, Any], sent: str) -> None:
    async with staged(engines=0, scripted=[Scripted(answer, own)]) as stage:
        headers = {"Authorization": "Bearer client"}
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models")):
            async with stage.session.request(method, path, json={"prompt": "a"}, headers=headers) as response:
                assert response.status == 200
        health, turn, models = (dict(re.findall(r"(\S+): (.*)\r", it.decode())) for it in stage.scripted[0].heads[:3])
        assert turn["Authorization"] == models["Authorization"] == sent
        assert health.get("Authorization") == (sent if own else None)
        for path in ("/engines", "/metrics"):
            async with stage.session.get(path) as response:
                assert "engine@" not in (text := await response.text()) and "pw" not in text and "Bearer" not in text


async def test_a_token_that_no_header_can_hold_is_refused() -> None:
    async with staged(engines=1) as stage:
        port = stage.session._base_url.port  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer \xff\xfe\r\nContent-Length: 2\r\n\r\n{}"
        )
        writer.write(head)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()


async def test_nobody_follows_an_engine_to_another_address() -> None:
    async def redirect(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 307 There\r\nLocation: http://127.0.0.1:1/v1/completions\r\nContent-Length: 0\r\n\r\n")

    async with staged(engines=0, scripted=[Scripted(redirect, {"api_key": "engine"})]) as stage:
        status, said = await stage.post("/v1/completions", {"prompt": "a"})
        assert status == 502 and "engine s0 redirects with status 307" in said["error"]["message"]


async def test_trajectories_in_progress_have_a_limit() -> None:
    async with staged(engines=1) as stage:
        stage.gateway.trajectories.most = 2
        turns = [{"prompt": [1] * 9, "max_tokens": 5, "libra": {"trajectory": f"t{number}"}} for number in range(3)]
        assert [(await stage.post("/v1/completions", turn))[0] for turn in turns] == [200, 200, 429]
        assert (await stage.post("/v1/completions", turns[0]))[0] == 200  # one of those
        assert (await stage.post("/v1/completions", {"prompt": [1] * 9, "max_tokens": 5}))[0] == 200
        assert (await stage.post("/trajectories/t1/finish", {}))[0] == 200
        assert (await stage.post("/v1/completions", turns[2]))[0] == 200


async def test_a_session_that_is_finished_during_a_turn_ends_after_it() -> None:
    async with staged(engines=1) as stage, asyncio.timeout(20):
        body = {"prompt": "a" * 40, "max_tokens": 30, "libra": {"trajectory": "t"}}
        assert (await stage.post("/v1/completions", body))[0] == 200
        turn = asyncio.create_task(stage.post("/v1/completions", body))
        while not stage.engine("e0").in_flight:
            await asyncio.sleep(0.002)
        status, said = await stage.post("/finish_session?session_id=t", {})
        assert (status, said["turns"]) == (200, 1) and not stage.finished
        assert (await turn)[0] == 200
        (trajectory,) = stage.finished
        assert trajectory.finished and [it.generated_tokens for it in trajectory.turns] == [30, 30]
        assert stage.gateway.counts.finished == 1 and not len(stage.gateway.trajectories)


async def test_a_session_whose_last_turn_got_no_answer_is_kept_as_unfinished() -> None:
    async with staged(engines=1) as stage, asyncio.timeout(20):
        body = {"prompt": "a" * 40, "max_tokens": 30, "libra": {"trajectory": "t"}}
        assert (await stage.post("/v1/completions", body))[0] == 200
        turn = asyncio.create_task(stage.post("/v1/completions", body))
        while not stage.engine("e0").in_flight:
            await asyncio.sleep(0.002)
        await stage.post("/finish_session?session_id=t", {})
        turn.cancel()
        while len(stage.gateway.trajectories):
            await asyncio.sleep(0.002)
        (trajectory,) = stage.finished
        assert not trajectory.finished and trajectory.turns[0].generated_tokens == 30
        assert stage.gateway.counts.finished == 0
