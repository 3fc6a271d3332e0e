"""What is remembered of trajectories under way is what happened to them."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.live.trajectories import Trajectories
from libra.route.policy import ToolReturn
from libra.serve.gateway.formats import FORMATS
from libra.serve.gateway.libra_field import UNKNOWN_TOOL, ReportedReturn
from libra.serve.gateway.turn_bodies import TurnBody, with_field


@dataclass(frozen=True)
class Turn:
    more: int  # tokens of the context that the turn before did not leave
    generated: int
    returned: ReportedReturn | None  # what the client says of the tool before it
    fails: int  # times that it is asked without an answer
    placed: bool  # whether the policy was asked when it failed


_returned = st.none() | st.builds(
    ReportedReturn, st.sampled_from(["a", "b"]), st.sampled_from(["ok", "error"]), st.none() | st.integers(0, 50)
)
_turn = st.builds(Turn, st.integers(0, 50), st.integers(1, 90), _returned, st.integers(0, 2), st.booleans())


@given(st.lists(_turn, min_size=1, max_size=6), st.none() | st.floats(-1, 1))
def test_what_is_learned_is_what_was_answered(turns: list[Turn], reward: float | None) -> None:
    live, now, context, tools, told = Trajectories(clock=lambda: 7.0), 0.0, 100, [], []
    for number, turn in enumerate(turns):
        if number:
            what = turn.returned or ReportedReturn()
            back = turn.more if what.returned_tokens is None else what.returned_tokens
            tools.append((what.name, what.status, back, 1.0))  # seconds from its answer to the next turn
            context += turn.more
        expected = ToolReturn(*tools[-1][:3]) if tools else None
        for attempt in range(turn.fails + 1):
            now += 1.0
            request, returned = live.begin("t", "p", "task", context, turn.returned, now)
            assert (request.prompt_tokens, request.context_tokens, request.prompt_id) == (100, context, "p")
            # A return is told once, with the first turn that is placed after it.
            assert returned == expected
            if attempt == turn.fails or turn.placed:
                if returned is not None:
                    told.append(returned)
                live.placed(request)
                expected = None
            if attempt < turn.fails:
                live.failed(request)
        with pytest.raises(ValueError, match="a turn is in flight"):
            live.begin("t", "p", "task", context, None, now)
        now += 2.0
        live.answered(request, context, turn.generated, now)
        context += turn.generated
    trajectory = live.whole("t", reward, 5)
    assert told == [ToolReturn(*tool[:3]) for tool in tools]
    assert [it.generated_tokens for it in trajectory.turns] == [turn.generated for turn in turns]
    assert [(it.tool, it.status, it.returned_tokens, it.tool_seconds) for it in trajectory.turns[:-1]] == tools
    assert (trajectory.prompt_tokens, trajectory.reward, trajectory.policy_version) == (100, reward, 5)
    assert trajectory.finished and trajectory.started_at == 7.0
    assert len(live) == 1 and live.forget("t") and len(live) == 0


def test_the_engines_count_of_a_prompt_replaces_a_guess() -> None:
    live = Trajectories()
    first, _ = live.begin("t", "p", "", 70, None, 0.0)
    live.answered(first, 64, 10, 1.0)
    request, returned = live.begin("t", "p", "", 90, None, 2.0)
    assert request.prompt_tokens == 64 and returned == ToolReturn(UNKNOWN_TOOL, "unknown", 90 - 74)


def test_a_trajectory_ends_with_an_answer_or_is_forgotten() -> None:
    live = Trajectories()
    with pytest.raises(KeyError):
        live.whole("t", None, 0)
    turn, _ = live.begin("t", "p", "", 70, None, 0.0)
    with pytest.raises(ValueError, match="its last turn has no answer"):
        live.whole("t", None, 0)
    assert live.forget("t") and not live.forget("t")
    live.answered(turn, 70, 3, 1.0)  # its trajectory has been forgotten
    live.failed(turn)
    assert len(live) == 0


def test_a_turn_of_a_forgotten_trajectory_says_nothing_of_a_new_one_with_its_name() -> None:
    live = Trajectories()
    old, _ = live.begin("t", "p", "", 70, None, 0.0)
    live.forget("t")
    new, _ = live.begin("t", "p", "", 70, None, 1.0)
    live.placed(old)
    live.answered(old, 70, 3, 2.0)
    live.failed(old)
    with pytest.raises(ValueError, match="a turn is in flight"):
        live.begin("t", "p", "", 70, None, 3.0)
    live.answered(new, 70, 5, 4.0)
    assert live.whole("t", None, 0).generated_tokens == 5


def test_idle_are_those_that_nothing_happened_to() -> None:
    live, turns = Trajectories(), {}
    for number, id in enumerate("abcd"):
        turns[id], _ = live.begin(id, "p", "", 10, None, float(number))
    for id, now in (("c", 5.0), ("d", 5.0), ("a", 10.0)):
        live.answered(turns[id], 10, 1, now)
    assert list(live.idle_since(4.0)) == []  # b has a turn under way
    assert list(live.idle_since(5.0)) == ["c", "d"]
    assert list(live.idle_since(10.0)) == ["c", "d", "a"]


# What is read of bodies


def body_of(path: str, body: bytes) -> TurnBody:
    return next(format for format in FORMATS if format.path == path).read(body)


@given(st.lists(st.integers(0, 10**6), max_size=40), st.sampled_from(["", " ", "\n  "]))
def test_prompts_of_tokens_are_counted(tokens: list[int], space: str) -> None:
    body = f'{{"prompt":{space}[{("," + space).join(map(str, tokens))}{space}], "x": 1}}'
    assert body_of("/v1/completions", body.encode()).prompt_tokens() == (len(tokens), True)


_text = st.text(st.sampled_from('"\\\\[],a'), max_size=8)
_tokens = st.lists(st.integers(0, 99), max_size=4)


@given(st.lists(_text, min_size=1) | st.lists(_tokens, min_size=1), st.sampled_from([None, 1]))
def test_several_prompts_are_counted(prompts: list[str] | list[list[int]], indent: int | None) -> None:
    assert body_of("/v1/completions", json.dumps({"prompt": prompts}, indent=indent).encode()).prompts() == len(prompts)


def test_counting_prompts_makes_no_object_for_each() -> None:
    read = body_of("/v1/completions", b'{"prompt": [' + b"[]," * 100_000 + b"[]]}")
    tracemalloc.start()
    try:
        assert read.prompts() == 100_001 and tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# (endpoint, body, tokens of its prompt, whether they are counted, tokens to generate, samples)
BODIES: list[tuple[str, bytes, int, bool, int | None, int]] = [
    (
        "/v1/completions",
        b'{"prompt": "12345678"}',
        3,
        False,
        None,
        1,
    ),  # ten characters with the quotes, four to a token
    ("/v1/completions", b'{"prompt": ["a", "b"], "max_tokens": 7}', 3, False, 7, 2),
    ("/v1/completions", b'{"prompt": [[1, 2], [3]], "n": 2}', 3, False, None, 4),
    ("/v1/completions", b"{}", 0, False, None, 1),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "n": 3}', 9, False, None, 3),
    ("/v1/chat/completions", b'{"max_tokens": 5, "max_completion_tokens": 6}', 0, False, 6, 1),
    ("/inference/v1/generate", b'{"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}}', 3, True, 8, 1),
    ("/inference/v1/generate", b'{"token_ids": [1], "sampling_params": {"n": 2}}', 1, True, None, 2),
    ("/generate", b'{"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4, "n": 2}}', 2, True, 4, 2),
    ("/generate", b'{"text": "12345678", "input_ids": null}', 3, False, None, 1),
    ("/generate", b'{"text": ["a", "b", "c"]}', 4, False, None, 3),
    ("/v1/responses", b'{"input": "123456", "instructions": "1234567890", "max_output_tokens": 9}', 5, False, 9, 1),
    ("/v1/messages", b'{"messages": ["1234"], "system": "12", "max_tokens": 2}', 3, False, 2, 1),
]


@pytest.mark.parametrize(("path", "body", "tokens", "counted", "most", "samples"), BODIES)
def test_bodies_say_what_they_need(
    path: str, body: bytes, tokens: int, counted: bool, most: int | None, samples: int
) -> None:
    read = body_of(path, body)
    assert read.prompt_tokens() == (tokens, counted) and read.samples() == samples
    assert read.needs(1000, 500) == (tokens, 500 if most is None else most)


CALL = '{"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "look"}}, {"id": "c2"}]}'


@pytest.mark.parametrize(
    ("messages", "name"),
    [
        (f'[{CALL}, {{"role": "tool", "tool_call_id": "c1", "content": "x"}}]', "look"),
        (f'[{CALL}, {{"role": "tool", "tool_call_id": "c2", "content": "x"}}]', UNKNOWN_TOOL),
        (f'[{CALL}, {{"role": "tool", "tool_call_id": "c3", "name": "own"}}]', "own"),
        (f'[{CALL}, {{"role": "tool", "tool_call_id": "c1"}}, {{"role": "user", "content": "tool"}}]', None),
        ('[{"role": "tool"}]', UNKNOWN_TOOL),
        ('[{"role": "tool", "tool_calls": 7}]', None),  # the engine has to judge it
        ('"tool"', None),
    ],
)
def test_a_tool_has_the_name_of_its_call(messages: str, name: str | None) -> None:
    returned = body_of("/v1/chat/completions", f'{{"messages": {messages}}}'.encode()).returned()
    assert returned == (None if name is None else ReportedReturn(name))


def test_a_trajectory_without_an_end_is_a_lower_bound() -> None:
    live = Trajectories(clock=lambda: 7.0)
    assert live.so_far("t") is None
    first, _ = live.begin("t", "p", "", 70, None, 0.0)
    assert live.so_far("t") is None
    live.answered(first, 70, 10, 1.0)
    second, _ = live.begin("t", "p", "", 90, ReportedReturn("look"), 2.0)
    live.failed(second)
    bound = live.so_far("t")
    assert bound is not None and not bound.finished and bound.started_at == 7.0
    assert [(turn.generated_tokens, turn.tool, turn.returned_tokens) for turn in bound.turns] == [(10, "look", 10)]


def test_a_field_is_added_without_touching_the_others() -> None:
    assert with_field(b' {"prompt": [1,  2]}\n', "priority", b"3") == b' {"prompt": [1,  2],"priority":3}'
