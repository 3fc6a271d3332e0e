"""The calculator task: its arithmetic, its tool, its prompts, and that doing everything right is worth 1."""

from __future__ import annotations

import asyncio
import random

import pytest

from libra.environments.calculator import Calculator, apply
from libra.environments.protocol import Prompt, Span, ToolCall, ToolError

INSTANT = Calculator(latency=0.0)
SKILLED = Calculator(latency=0.0, skill=1.0)


@pytest.mark.parametrize(
    ("left", "operator", "right", "wanted"),
    [
        (12, "+", 34, 46),
        (12, "-", 34, -22),
        (-3, "*", 7, -21),
        (7, "/", 2, 3),
        (-7, "/", 2, -4),  # floor division: downwards, not towards zero
        (0, "/", 9, 0),
    ],
)
def test_apply(left: int, operator: str, right: int, wanted: int) -> None:
    assert apply(left, operator, right) == wanted


def test_apply_refuses_what_is_no_operation() -> None:
    with pytest.raises(ZeroDivisionError):
        apply(1, "/", 0)
    with pytest.raises(ValueError, match="operator '%': expected one of"):
        apply(1, "%", 2)


@pytest.mark.parametrize(
    ("argument", "returned"), [("12+34", "=46;"), ("-7/2", "=-4;"), ("5-99", "=-94;"), ("99*9", "=891;")]
)
def test_the_tool_returns_the_result(argument: str, returned: str) -> None:
    assert asyncio.run(INSTANT.calculate(argument)) == returned


@pytest.mark.parametrize(
    ("argument", "read"),
    [
        ("4/0", "=!;"),
        ("", "=?;"),
        ("12", "=?;"),
        ("12+", "=?;"),
        ("1+2+3", "=?;"),
        ("1+-2", "=?;"),
        ("1+2;", "=?;"),
        ("1234567+1", "=?;"),
        ("__import__", "=?;"),
    ],
)
def test_the_tool_raises_an_error_that_the_agent_reads(argument: str, read: str) -> None:
    with pytest.raises(ToolError) as error:
        asyncio.run(INSTANT.calculate(argument))
    assert str(error.value) == read


def test_a_call_can_take_longer_than_the_deadline() -> None:
    slow = Calculator(latency=1e9, deadline=0.001)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(slow.calculate("1+1"), slow.deadline))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (">12+34;", ToolCall("calculator", "12+34")),
        (">;", ToolCall("calculator", "")),
        ("A46;", None),
        (">12+34", None),  # cut off before the stop
        ("12+34;", None),
        ("", None),
    ],
)
def test_parse(text: str, wanted: ToolCall | None) -> None:
    assert INSTANT.parse(text) == wanted


@pytest.mark.parametrize(
    ("answer", "text", "wanted"),
    [
        ("46", "A46;", 1.0),
        ("46", "A47;", 0.0),
        ("46", "A46", 0.0),
        ("46", "46;", 0.0),
        ("!", "A!;", 1.0),
        ("!", "", 0.0),
    ],
)
def test_reward(answer: str, text: str, wanted: float) -> None:
    assert INSTANT.reward(Prompt("p", "Q12+34;", answer), text) == wanted


def test_prompts_are_deterministic_distinct_and_never_in_both_splits() -> None:
    train, heldout = INSTANT.prompts("train", 400, seed=1), INSTANT.prompts("heldout", 400, seed=1)
    assert INSTANT.prompts("train", 400, seed=1) == train
    assert INSTANT.prompts("train", 400, seed=2) != train
    other_seed = {prompt.id for prompt in INSTANT.prompts("heldout", 400, seed=2)}
    ids = {prompt.id for prompt in train}
    assert len(ids) == len(train) == 400
    assert ids.isdisjoint(prompt.id for prompt in heldout)
    assert ids.isdisjoint(other_seed)


def test_answers_are_what_arithmetic_from_left_to_right_gives() -> None:
    prompts = INSTANT.prompts("train", 300, seed=0)
    assert [prompt.answer for prompt in prompts] == [answer_of(prompt.id) for prompt in prompts]
    assert "!" in {prompt.answer for prompt in prompts}


def test_everything_the_agent_can_meet_is_in_the_alphabet() -> None:
    rng = random.Random(0)
    texts = [span.text for _ in range(500) for span in INSTANT.demonstration(rng)]
    texts += [prompt.text + prompt.answer for prompt in INSTANT.prompts("train", 200, seed=0)]
    texts += [INSTANT.timeout_text, INSTANT.error_text, INSTANT.stop]
    assert set("".join(texts)) <= set(INSTANT.alphabet)


def test_a_skilled_demonstration_played_with_the_real_tool_is_worth_1() -> None:
    rng = random.Random(0)
    assert {asyncio.run(play(SKILLED, SKILLED.demonstration(rng))) for _ in range(300)} == {1.0}


def test_unskilled_demonstrations_are_mostly_wrong() -> None:
    rng = random.Random(0)
    unskilled = Calculator(skill=0.0)
    right = 0
    for _ in range(300):
        prompt, *turns = unskilled.demonstration(rng)
        expression = prompt.text[1:-1]
        right += turns[-1].text == f"A{answer_of(expression)};"
    assert right < 30


async def play(environment: Calculator, spans: list[Span]) -> float:
    """Make the calls of a demonstration; what the tool returns must be what the demonstration says it does."""
    question, *turns = spans
    expression = question.text[1:-1]
    prompt = Prompt(expression, question.text, answer_of(expression))
    while True:
        said, *turns = turns
        assert said.generated
        assert len(said.text) <= environment.turn_tokens
        call = environment.parse(said.text)
        if call is None:
            assert not turns
            return environment.reward(prompt, said.text)
        returned, *turns = turns
        if returned.text == environment.timeout_text:
            continue
        try:
            assert await environment.tools[call.tool](call.argument) == returned.text
        except ToolError as error:
            assert str(error) == returned.text


def answer_of(expression: str) -> str:
    """Left to right, without the environment's own code."""
    terms = expression.replace("+", " + ").replace("-", " - ").replace("*", " * ").replace("/", " // ").split()
    value = int(terms[0])
    for operator, right in zip(terms[1::2], terms[2::2], strict=True):
        if operator == "//" and int(right) == 0:
            return "!"
        value = eval(f"({value}) {operator} {right}")
    return str(value)
