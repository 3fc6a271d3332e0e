"""Sessions that have no name are found by their prompts and answers, and never mistaken for one another."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve.stage import staged

from libra.serve.gateway.history import BLOCK, PromptHistory, history_of
from libra.serve.gateway.said import Said
from libra.serve.gateway.unnamed import UnnamedSessions

SEED = 7


def history(prompt: Any, seed: int = SEED, **style: Any) -> PromptHistory:
    found = history_of(json.dumps(prompt, **style).encode(), seed)
    assert found is not None
    return found


def said(answer: Any) -> Said:
    heard = Said()
    if isinstance(answer, list):
        heard.tokens = answer
    elif isinstance(answer, str):
        heard.texts = [answer]
    else:
        heard.add(json.dumps({"choices": [{"message": answer}]}).encode())
    return heard


class Client:
    """The sessions as the gateway keeps them, by turns."""

    def __init__(self, most: int = 100) -> None:
        self.sessions = UnnamedSessions(most)
        self.made = 0

    def turn(self, prompt: Any, answer: Any, **style: Any) -> str:
        """Name of the session that a turn gets."""
        read = history(prompt, **style)
        name = self.sessions.claim(read)
        if name is None:
            self.made += 1
            name = str(self.made)
        form = None if answer is None else read.kind.of(said(answer))
        self.sessions.keep(name, read, form, answered=answer is not None)
        return name


# Trajectories


def drawn(count: int, seed: int) -> list[list[tuple[list[int], list[int]]]]:
    """Trajectories of 2 to 8 turns, as (prompt, answer) of token ids: all share a system prompt, and 8 each a task."""
    random_ = random.Random(seed)
    system = [random_.randrange(150_000) for _ in range(600)]
    trajectories = []
    for number in range(count):
        if number % 8 == 0:
            task = [random_.randrange(150_000) for _ in range(random_.randrange(5, 200))]
        prompt, turns = [*system, *task], []
        for _ in range(random_.randrange(2, 9)):
            answer = [random_.randrange(150_000) for _ in range(random_.randrange(1, 80))]
            turns.append((prompt, answer))
            prompt = [*prompt, *answer, *(random_.randrange(150_000) for _ in range(random_.randrange(1, 60)))]
        trajectories.append(turns)
    return trajectories


def interleaved(trajectories: list[list[Any]], seed: int) -> Iterator[tuple[int, Any]]:
    """(number of the trajectory, its next turn), in a random order of trajectories."""
    random_ = random.Random(seed)
    left = {number: iter(turns) for number, turns in enumerate(trajectories)}
    while left:
        number = random_.choice(list(left))
        turn = next(left[number], None)
        if turn is None:
            del left[number]
        else:
            yield number, turn


@pytest.mark.parametrize("separators", [None, (",", ":")])
def test_all_turns_of_a_thousand_trajectories_find_theirs(separators: tuple[str, str] | None) -> None:
    client, names = Client(most=2000), {}
    for number, (prompt, answer) in interleaved(drawn(1000, 1), 2):
        name = client.turn(prompt, answer, separators=separators)
        assert names.setdefault(number, name) == name
    assert len(set(names.values())) == 1000 == client.made


# Against a search of all that is known


SMALL = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.integers(0, 9), SMALL, SMALL), max_size=30), st.integers(0, 200))
def test_a_search_of_all_sessions_finds_the_same(steps: list[tuple[int, list[int], list[int]]], pad: int) -> None:
    """Prompts of few different ids go on from earlier contexts, so that many are prefixes of others."""
    client = Client()
    known: dict[str, tuple[list[int], list[int]]] = {}  # last prompt and answer
    contexts = [[9] * pad]
    for back, more, answer in steps:
        prompt = [*contexts[-1 - back % len(contexts)], *more]
        continued = {
            name: (len(last), len(its))
            for name, (last, its) in known.items()
            if len(last) < len(prompt) and prompt[: len(last) + len(its)] == [*last, *its]
        }
        best = max(continued.values(), default=None)
        name = client.turn(prompt, answer)
        assert (name in known) == (best is not None)
        assert best is None or continued[name] == best
        known[name] = prompt, answer
        contexts.append([*prompt, *answer])


# Chats and text

USER, SYSTEM = {"role": "user", "content": "what is it?"}, {"role": "system", "content": "x" * 3 * BLOCK}
ANSWER = {"role": "assistant", "content": " four \n", "tool_calls": None}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "look"}}]}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "402"}


@pytest.mark.parametrize(
    ("answer", "sent_back"),
    [
        (ANSWER, ANSWER),
        (ANSWER, {"role": "assistant", "content": "four"}),
        (ANSWER, {"content": [{"type": "text", "text": " four"}], "role": "assistant"}),
        (CALLS, CALLS),
        (CALLS, CALLS | {"content": "rewritten"}),
    ],
)
def test_a_chat_goes_on_with_its_answer(answer: dict[str, Any], sent_back: dict[str, Any]) -> None:
    client = Client()
    first = client.turn([SYSTEM, USER], answer)
    assert client.turn([SYSTEM, USER], {"role": "assistant", "content": "five"}) != first  # another sample
    assert client.turn([SYSTEM, USER, sent_back, TOOL], ANSWER) == first
    assert client.turn([SYSTEM, USER, {"role": "assistant", "content": "six"}, USER], ANSWER) not in (first, "2")


BLOCKS = [{"type": "text", "text": "let me look"}, {"type": "tool_use", "id": "t1", "name": "look", "input": {}}]
EVENTS = [
    {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 5, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "let me"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " look"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "id": "t1", "name": "look"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
    {"type": "message_stop"},
]


@pytest.mark.parametrize("answers", [[{"role": "assistant", "content": BLOCKS}], EVENTS])
@pytest.mark.parametrize("calls", [True, False])
def test_messages_of_anthropic_go_on_with_their_answer(answers: list[dict[str, Any]], calls: bool) -> None:
    sessions, heard = UnnamedSessions(), Said()
    for answer in answers:
        if calls or answer.get("content_block", {}).get("type") != "tool_use":
            heard.add(json.dumps(answer if calls or answer in EVENTS else answer | {"content": BLOCKS[:1]}).encode())
    assert not heard.unread
    first = history([USER])
    sessions.keep("a", first, first.kind.of(heard), answered=True)
    sent_back = BLOCKS if calls else BLOCKS[:1]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "402"}]}
    assert sessions.claim(history([USER, {"role": "assistant", "content": "another"}, result])) is None
    assert sessions.claim(history([USER, {"role": "assistant", "content": sent_back}, result])) == "a"


def test_text_goes_on_with_its_answer() -> None:
    client = Client()
    first = client.turn("what is it? ", 'four "é"')
    assert client.turn('what is it? four "é" and then? ', "x", ensure_ascii=False) == first
    assert client.turn('what is it? four "é" and then? ', "x") != first


def test_a_prompt_that_came_without_an_answer_may_come_again() -> None:
    client = Client()
    first = client.turn([1, 2, 3], None)
    assert client.turn([1, 2, 3, 4], [9]) != first
    assert client.turn([1, 2, 3], [4, 5]) == first
    assert client.turn([1, 2, 3], [4, 5]) != first  # it was answered
    assert client.turn([1, 2, 3, 4, 5, 6], [7]) == first


def test_answers_that_cannot_be_compared_decide_nothing_between_sessions() -> None:
    client = Client()
    first = client.turn([1, 2, 3], "text for ids")
    assert client.turn([1, 2, 3, 4, 5], "x") == first  # the only one of its prompt
    several = {client.turn([6, 7], "text for ids") for _ in range(2)}
    assert len(several) == 2 and client.turn([6, 7, 8], "x") not in several


def test_a_branch_of_a_session_is_another_one() -> None:
    client = Client()
    first = client.turn([1, 2], [3])
    assert client.turn([1, 2, 3, 4], [5]) == first
    assert client.turn([1, 2, 3, 6], [5]) != first


def test_ids_end_where_they_are_written_to_end() -> None:
    client = Client()
    first = client.turn([1, 2], [3])
    assert client.turn([1, 23, 3], [5]) != first and client.turn([1, 2, 34], [5]) != first


def test_requests_that_differ_otherwise_never_meet() -> None:
    sessions = UnnamedSessions()
    sessions.keep("a", history([1, 2], seed=1), None, answered=True)
    assert sessions.claim(history([1, 2, 3], seed=2)) is None
    assert sessions.claim(history([1, 2, 3], seed=1)) == "a"


@given(st.integers(0, 3 * BLOCK), st.integers(1, 3 * BLOCK))
def test_histories_of_any_length_are_found(length: int, more: int) -> None:
    client = Client()
    name = client.turn("a" * length, "b")
    assert client.turn("a" * length + "b" + "c" * more, "d") == name


def test_the_oldest_sessions_are_given_up() -> None:
    sessions = UnnamedSessions(most=2)
    assert [sessions.keep(name, history([number]), b"x", True) for number, name in enumerate("abc")] == [[], [], ["a"]]
    assert len(sessions) == 2 and sessions.claim(history([0, 1])) is None
    sessions.drop("b")
    sessions.drop("b")
    assert len(sessions) == 1
    sessions.drop("c")
    assert not sessions._at and not sessions._tails


def test_one_prompt_has_no_end_of_sessions() -> None:
    sessions = UnnamedSessions()
    given_up = [sessions.keep(str(number), history([1]), b"%d" % number, True) for number in range(600)]
    assert [names for names in given_up if names] == [[str(number)] for number in range(88)] and len(sessions) == 512


@pytest.mark.parametrize("prompt", ['"', "7", "null", "[]", '["a", "b"]', "[[1], [2]]", '{"a": 1}', ""])
def test_what_is_no_prompt_of_one_sequence_has_no_history(prompt: str) -> None:
    assert history_of(prompt.encode(), SEED) is None


# Over sockets


@pytest.mark.parametrize("stream", [False, True])
async def test_agents_that_name_nothing_become_trajectories(stream: bool) -> None:
    async with staged(idle_seconds=60.0) as stage:

        async def ask(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": 6, "return_token_ids": True, "stream": stream}
            async with stage.session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                text = await response.text()
            if not stream:
                return list(json.loads(text)["choices"][0]["token_ids"])
            events = [json.loads(it.removeprefix("data: ")) for it in text.split("\n\n")[:-2]]
            return [token for event in events for token in event["choices"][0]["token_ids"]]

        prompts: list[list[int]] = [[4] * 100 + [number // 4] for number in range(12)]
        for _ in range(4):
            answers = [await ask(prompt) for prompt in prompts]
            prompts = [[*prompt, *answer, 7, 7] for prompt, answer in zip(prompts, answers, strict=True)]
        assert len(stage.gateway.trajectories) == 12
        ids = {call.trajectory_id for call in stage.policy.calls if hasattr(call, "trajectory_id")}
        for id in ids:
            assert (await stage.post(f"/trajectories/{id}/finish", {}))[0] == 200
        assert [len(it.turns) for it in stage.finished] == [4] * 12 and len(stage.gateway.sessions.unnamed) == 0


async def test_a_session_that_is_given_up_is_a_lower_bound() -> None:
    async with staged(engines=1) as stage:
        stage.gateway.sessions.unnamed._most = 1
        for number in range(2):
            await stage.post("/v1/completions", {"prompt": [number] * 20, "max_tokens": 5})
        (bound,) = stage.finished
        assert not bound.finished and bound.generated_tokens == 5 and len(stage.gateway.trajectories) == 1
        assert stage.gateway.lengths.summary()["unfinished"] == 1
