"""What is remembered of trajectories under way is what happened to them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.route.policy import ToolReturn
from libra.serve.gateway.trajectories import UNKNOWN_TOOL, ReportedReturn, Trajectories, read_turn, with_field


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
    live, now, context, tools, told = Trajectories(), 0.0, 100, [], []
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
    assert trajectory.finished and trajectory.started_at == 1.0
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


@given(st.lists(st.integers(0, 10**6), max_size=40), st.sampled_from(["", " ", "\n  "]))
def test_prompts_of_tokens_are_counted(tokens: list[int], space: str) -> None:
    body = f'{{"prompt":{space}[{("," + space).join(map(str, tokens))}{space}], "x": 1}}'
    assert read_turn(body.encode()).prompt_tokens() == (len(tokens), True)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"prompt": "12345678"}', 3),  # ten characters with the quotes, four to a token
        (b'{"messages": [{"role": "user", "content": "a"}]}', 9),
        (b'{"prompt": null, "messages": ["1234"]}', 2),
        (b'{"prompt": ["a", "b"]}', 3),
        (b"{}", 0),
    ],
)
def test_text_is_guessed_by_its_length(body: bytes, tokens: int) -> None:
    assert read_turn(body).prompt_tokens() == (tokens, False)


def test_a_field_is_added_without_touching_the_others() -> None:
    assert with_field(b' {"prompt": [1,  2]}\n', "priority", b"3") == b' {"prompt": [1,  2],"priority":3}'
