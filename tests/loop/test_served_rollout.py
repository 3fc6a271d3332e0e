"""Episodes that an environment plays over HTTP: what was sampled is what is trained on, whatever it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.chats import write_chat_model
from fakes.engines import Part, Script, ScriptedEngine, Take, turn
from fakes.far_end import PATIENCE
from fakes.scripted import FirstInstance, make_fleet

from libra.backends.chat_format import ChatFormat
from libra.config.run import ConfigError
from libra.environments.protocol import Prompt
from libra.environments.served import EpisodeFailedError, Seat
from libra.loop.episode import Episode, EpisodeRequest
from libra.loop.episode_server import EpisodeServer
from libra.loop.served_rollout import ServedRollout
from libra.loop.turn_maker import RolloutObserver, TurnMaker, TurnReport
from libra.route.policy import ToolReturn
from libra.trajectory import Turn

Play = Callable[[aiohttp.ClientSession, str], Awaitable[float]]


class Balance:
    """Counts of turns and tools, which are 0 when all episodes are over."""

    def __init__(self) -> None:
        self.turns_now = self.tools_now = 0

    def turn(self, report: TurnReport) -> None: ...

    def turns(self, worker: str, change: int) -> None:
        self.turns_now += change

    def tools(self, worker: str, change: int) -> None:
        self.tools_now += change
        assert self.tools_now >= 0


class Played:
    """An environment that does what a test wrote down, with a client of the episode's own URL."""

    name, turn_tokens = "played", 16

    def __init__(self, *plays: Play) -> None:
        self._plays = list(plays)

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        raise NotImplementedError

    def opened(self, logs: Path) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    async def play(self, prompt: Prompt, seat: Seat) -> float:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {seat.key}"}) as client:
            play = self._plays[0] if len(self._plays) == 1 else self._plays.pop(0)
            return await play(client, seat.url)


class Forgetting(FirstInstance):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[str] = []

    def forget(self, trajectory_id: str) -> None:
        self.forgotten.append(trajectory_id)


async def ask(client: aiohttp.ClientSession, url: str, *messages: tuple[str, str], **more: Any) -> Any:
    body = {"model": "policy", "messages": [{"role": role, "content": text} for role, text in messages], **more}
    async with client.post(f"{url}/chat/completions", json=body) as answer:
        return {"status": answer.status, **(await answer.json())}


def said(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


class Stage:
    """A model that chats, and engines that answer what was written down."""

    def __init__(self, directory: Path, longest: int = 100, calls: bool = False) -> None:
        write_chat_model(directory, calls=calls)
        self.chat, self.longest = ChatFormat(directory), longest
        self.policy, self.balance, self.script = Forgetting(), Balance(), Script()

    def tokens(self, text: str) -> list[int]:
        return self.chat.encode(text)

    def samples(self, text: str) -> Part:
        return turn(self.tokens(text))

    def play(self, environment: Played, *answers: Part | Callable[[Take], None]) -> Episode:
        async def run() -> Episode:
            self.script = Script(*answers)
            fleet = make_fleet(self.policy, ScriptedEngine("rollout-0", self.script))
            observer: RolloutObserver = self.balance
            turns = TurnMaker(environment.name, self.chat.stop_token, fleet, observer)
            async with EpisodeServer.open() as server:
                rollout = ServedRollout(environment, self.chat, server, turns, self.longest, lambda: 12.5)
                return await rollout.episode(EpisodeRequest("e", Prompt("p", "", ""), 0.0, 1.0))

        try:
            return asyncio.run(asyncio.wait_for(run(), PATIENCE))
        finally:
            assert (self.balance.turns_now, self.balance.tools_now) == (0, 0)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_tokens_that_were_sampled_go_on_unchanged_in_one_context(stage: Stage) -> None:
    async def play(client: aiohttp.ClientSession, url: str) -> float:
        first = await ask(client, url, ("user", "Q12+3"))
        assert (said(first), first["choices"][0]["finish_reason"]) == (">12+3", "stop")
        assert first["usage"] == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}
        second = await ask(client, url, ("user", "Q12+3"), ("assistant", ">12+3"), ("tool", "=15"))
        assert said(second) == "A15"
        return 0.5

    episode = stage.play(Played(play), stage.samples(">12+3;"), stage.samples("A15;"))
    assert episode.tokens == stage.tokens("Q12+3;>12+3;=15;A15;")
    assert episode.generated == [False] * 6 + [True] * 6 + [False] * 4 + [True] * 4
    assert episode.logprobs[6:12] == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    first, last = episode.trajectory.turns
    assert (first.generated_tokens, first.returned_tokens) == (6, 4)
    assert last == Turn(4, None, None, 0)
    assert (episode.reward, episode.trajectory.prompt_tokens, episode.branches) == (0.5, 6, ())
    assert stage.policy.asked == [("place", None), ("tool_returned", ToolReturn("unknown", "unknown", 4))]
    assert stage.policy.done == [episode.trajectory]


def test_a_prompt_that_goes_on_with_nothing_is_a_context_of_the_same_reward(stage: Stage) -> None:
    async def play(client: aiohttp.ClientSession, url: str) -> float:
        await ask(client, url, ("user", "Q1"))
        await ask(client, url, ("user", "Q2"), ("assistant", "forgot"))
        await ask(client, url, ("user", "Q1"), ("assistant", ">1"), ("user", "=1"))
        return 1.0

    episode = stage.play(Played(play), stage.samples(">1;"), stage.samples(">2;"), stage.samples("A;"))
    assert episode.tokens == stage.tokens("Q1;>1;=1;A;")
    [branch] = episode.branches
    assert branch.tokens == stage.tokens("Q2;forgot;>2;") and branch.reward == 1.0
    assert [each.trajectory.id for each in episode.contexts] == ["e", "e~1"]


def test_a_turn_that_was_cut_off_goes_on_after_its_last_token(stage: Stage) -> None:
    async def play(client: aiohttp.ClientSession, url: str) -> float:
        cut = await ask(client, url, ("user", "Q1"), max_tokens=2)
        assert cut["choices"][0]["finish_reason"] == "length"
        await ask(client, url, ("user", "Q1"), ("assistant", said(cut)), ("user", "=1"))
        return 1.0

    episode = stage.play(Played(play), stage.samples(">1"), stage.samples("A;"))
    assert episode.tokens == stage.tokens("Q1;>1;=1;A;")
    assert episode.generated == [False] * 3 + [True] * 2 + [False] * 4 + [True] * 2


def test_calls_of_tools_are_told_in_the_words_of_openai_and_named_to_the_policy(tmp_path: Path) -> None:
    async def play(client: aiohttp.ClientSession, url: str) -> float:
        tools = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
        first = await ask(client, url, ("user", "Q1"), tools=tools)
        message = first["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "calculator", "arguments": '{"argument": "1+2"}'}
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        back = [{"role": "user", "content": "Q1"}, message]
        back.append({"role": "tool", "tool_call_id": call["id"], "content": "=3"})
        async with client.post(f"{url}/chat/completions", json={"messages": back, "tools": tools}) as answer:
            assert answer.status == 200
        return 1.0

    stage = Stage(tmp_path, calls=True)
    episode = stage.play(Played(play), stage.samples(">1+2;"), stage.samples("A3;"))
    assert episode.tokens == stage.tokens("Q1;>1+2;=3;A3;")
    assert stage.policy.asked[1] == ("tool_returned", ToolReturn("calculator", "unknown", 3))


def test_what_no_engine_holds_is_refused_and_has_no_reward_unless_one_is_given(tmp_path: Path) -> None:
    async def lost(client: aiohttp.ClientSession, url: str) -> float:
        await ask(client, url, ("user", "Q1"))
        refused = await ask(client, url, ("user", "Q1"), ("assistant", ">1"), ("user", "=" * 20))
        assert refused["status"] == 400 and "context_length_exceeded" in refused["error"]["message"]
        raise ValueError("the model is gone")

    stage = Stage(tmp_path, longest=20)
    episode = stage.play(Played(lost), stage.samples(">1;"))
    assert (episode.reward, episode.tokens) == (0.0, stage.tokens("Q1;>1;"))


def test_an_environment_that_fails_plays_again_and_ends_the_run_when_it_goes_on_failing(stage: Stage) -> None:
    async def fails(client: aiohttp.ClientSession, url: str) -> float:
        await ask(client, url, ("user", "Q1"))
        raise OSError("no sandbox")

    async def well(client: aiohttp.ClientSession, url: str) -> float:
        await ask(client, url, ("user", "Q1"))
        return 1.0

    episode = stage.play(Played(fails, well), stage.samples(">1;"), stage.samples(">2;"))
    assert episode.tokens == stage.tokens("Q1;>2;")
    assert stage.policy.forgotten == ["e"]
    with pytest.raises(EpisodeFailedError, match="episode e of p failed 3 times: OSError: no sandbox"):
        stage.play(Played(fails), *([stage.samples(">1;")] * 3))


def test_a_client_that_a_failed_attempt_left_behind_is_refused(stage: Stage) -> None:
    left = []

    async def fails(client: aiohttp.ClientSession, url: str) -> float:
        left.append(url)
        raise OSError("no sandbox")

    async def well(client: aiohttp.ClientSession, url: str) -> float:
        assert (await ask(client, left[0], ("user", "Q9")))["status"] == 404
        await ask(client, url, ("user", "Q1"))
        return 1.0

    assert stage.play(Played(fails, well), stage.samples(">1;")).tokens == stage.tokens("Q1;>1;")


def test_an_environment_that_asks_for_nothing_fails(stage: Stage) -> None:
    async def idle(client: aiohttp.ClientSession, url: str) -> float:
        return 1.0

    with pytest.raises(EpisodeFailedError, match="made no request to the model"):
        stage.play(Played(idle))


def test_an_error_of_the_run_is_not_one_of_the_environment(stage: Stage) -> None:
    def crash(take: Take) -> None:
        raise ZeroDivisionError("of the engine")

    async def play(client: aiohttp.ClientSession, url: str) -> float:
        assert (await ask(client, url, ("user", "Q1")))["status"] == 500
        return 1.0

    with pytest.raises(ZeroDivisionError, match="of the engine"):
        stage.play(Played(play), crash)


def test_requests_that_cannot_be_trained_on_are_refused(stage: Stage) -> None:
    async def play(client: aiohttp.ClientSession, url: str) -> float:
        for field, value in {"n": 2, "stop": ["x"], "response_format": {"type": "json_object"}}.items():
            refused = await ask(client, url, ("user", "Q1"), **{field: value})
            assert refused["status"] == 400 and refused["error"]["message"].startswith(field)
        async with client.post(f"{url}/chat/completions", json={"messages": 3}) as answer:
            assert answer.status == 400
        async with client.post(f"{url.replace('/e-', '/f-')}/chat/completions", json={"messages": []}) as answer:
            assert answer.status == 404
        async with aiohttp.ClientSession() as stranger, stranger.post(f"{url}/chat/completions", json={}) as answer:
            assert answer.status == 401
        await ask(client, url, ("user", "Q1"))
        return 1.0

    assert stage.play(Played(play), stage.samples("A;")).tokens == stage.tokens("Q1;A;")


def test_a_streamed_turn_comes_as_events(stage: Stage) -> None:
    async def play(client: aiohttp.ClientSession, url: str) -> float:
        body = {"messages": [{"role": "user", "content": "Q1"}], "stream": True}
        async with client.post(f"{url}/chat/completions", json=body) as answer:
            text = await answer.text()
        assert '"content": "A1"' in text and '"finish_reason": "stop"' in text
        assert text.endswith("data: [DONE]\n\n")
        return 1.0

    assert stage.play(Played(play), stage.samples("A1;")).tokens == stage.tokens("Q1;A1;")


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    write_chat_model(tmp_path, template=None)
    with pytest.raises(ConfigError, match="has no chat_template: this environment chats"):
        ChatFormat(tmp_path)
