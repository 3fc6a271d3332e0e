"""The example of a plugged-in task: found through its configuration only, and solvable by following its store."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libra.config.run import load_config
from libra.environments.protocol import Prompt, Span, ToolCall, ToolError
from libra.environments.registry import load_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = load_config(EXAMPLES / "lookup.yaml")
LOOKUP: Any = load_environment(CONFIG.environment, EXAMPLES)
INSTANT = replace(LOOKUP, latency=0.0)
SKILLED = replace(LOOKUP, latency=0.0, skill=1.0)


def find(entry: str) -> str:
    """A key whose entry opens with `entry`; `-`: a key without one."""
    if entry == "-":
        return next(prompt.id for prompt in prompts() if prompt.id not in INSTANT.store)
    return next(key for key, found in INSTANT.store.items() if found.startswith(entry))


def prompts() -> list[Prompt]:
    found: list[Prompt] = INSTANT.prompts("train", 500, 0) + INSTANT.prompts("heldout", 200, 0)
    return found


def answer_of(key: str) -> str:
    """Follow the store, without the environment's own code."""
    while INSTANT.store.get(key, "-").startswith("@"):
        key = INSTANT.store[key][1:]
    return str(INSTANT.store.get(key, "-"))


def test_a_hit_returns_a_value_or_a_key_to_follow() -> None:
    value, leads = find("4"), find("@")
    assert asyncio.run(INSTANT.look_up(value)) == f"={INSTANT.store[value]};"
    assert asyncio.run(INSTANT.look_up(leads)) == f"={INSTANT.store[leads]};"


def test_a_miss_is_an_error_that_the_agent_reads() -> None:
    with pytest.raises(ToolError) as error:
        asyncio.run(INSTANT.look_up(find("-")))
    assert str(error.value) == "=-;"


@pytest.mark.parametrize("argument", ["", "bea", "beads", "bea;", "BEAD", "zzzz", "12"])
def test_a_malformed_call_is_an_error_that_the_agent_reads(argument: str) -> None:
    with pytest.raises(ToolError) as error:
        asyncio.run(INSTANT.look_up(argument))
    assert str(error.value) == "=?;"


def test_a_call_can_take_longer_than_the_deadline() -> None:
    slow = replace(LOOKUP, latency=1e9, deadline=0.001)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(slow.look_up("bead"), slow.deadline))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (">bead;", ToolCall("lookup", "bead")),
        (">;", ToolCall("lookup", "")),
        ("A42;", None),
        (">bead", None),  # cut off before the stop
        ("bead;", None),
        ("", None),
    ],
)
def test_parse(text: str, wanted: ToolCall | None) -> None:
    assert INSTANT.parse(text) == wanted


@pytest.mark.parametrize(
    ("answer", "text", "wanted"),
    [
        ("42", "A42;", 1.0),
        ("42", "A4;", 0.0),
        ("42", "A42", 0.0),
        ("42", "42;", 0.0),
        ("-", "A-;", 1.0),
        ("42", "A-;", 0.0),
        ("-", "", 0.0),
    ],
)
def test_reward(answer: str, text: str, wanted: float) -> None:
    assert INSTANT.reward(Prompt("p", "Qbead;", answer), text) == wanted


def test_prompts_are_deterministic_distinct_and_never_in_both_splits() -> None:
    train, heldout = INSTANT.prompts("train", 500, 1), INSTANT.prompts("heldout", 200, 1)
    assert INSTANT.prompts("train", 500, 1) == train
    assert INSTANT.prompts("train", 500, 2) != train
    other_seed = {prompt.id for prompt in INSTANT.prompts("heldout", 200, 2)}
    ids = {prompt.id for prompt in train}
    assert len(ids) == len(train) == 500
    assert ids.isdisjoint(prompt.id for prompt in heldout)
    assert ids.isdisjoint(other_seed)


def test_more_prompts_than_there_are_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"there are \d+ different heldout prompts, not 5000: ask for fewer"):
        INSTANT.prompts("heldout", 5000, 0)


def test_answers_are_what_the_store_leads_to() -> None:
    assert [prompt.answer for prompt in prompts()] == [answer_of(prompt.id) for prompt in prompts()]


def test_the_task_has_misses_and_chains_and_no_answer_that_is_always_right() -> None:
    calls = [len(calls_for(prompt.id)) for prompt in prompts()]
    assert set(calls) == {1, 2, 3, 4, 5, 6}
    missed = sum(prompt.answer == "-" for prompt in prompts()) / len(prompts())
    assert 0.2 < missed < 0.5


def test_an_agent_that_follows_the_store_through_the_tool_gets_every_answer() -> None:
    for prompt in prompts():
        assert INSTANT.reward(prompt, asyncio.run(follow(prompt))) == 1.0


def test_a_skilled_demonstration_played_with_the_real_tool_is_worth_1() -> None:
    rng = random.Random(0)
    assert {asyncio.run(play(SKILLED.demonstration(rng))) for _ in range(300)} == {1.0}


def test_unskilled_demonstrations_are_mostly_wrong() -> None:
    rng = random.Random(0)
    unskilled = replace(LOOKUP, skill=0.0)
    spans = [unskilled.demonstration(rng) for _ in range(300)]
    right = sum(answer_of(question.text[1:-1]) == last.text[1:-1] for question, *_, last in spans)
    assert right < 150


def test_everything_the_agent_can_meet_is_in_the_alphabet_and_fits_the_engines() -> None:
    rng = random.Random(0)
    episodes = [SKILLED.demonstration(rng) for _ in range(1000)]
    texts = [span.text for spans in episodes for span in spans] + [LOOKUP.timeout_text, LOOKUP.error_text, LOOKUP.stop]
    assert set("".join(texts)) <= set(LOOKUP.alphabet)
    longest = max(shape.max_model_len for shape in CONFIG.engines.values())
    assert max(sum(len(span.text) for span in spans) for spans in episodes) <= longest


def calls_for(key: str) -> list[str]:
    calls = [key]
    while INSTANT.store.get(key, "-").startswith("@"):
        key = INSTANT.store[key][1:]
        calls.append(key)
    return calls


async def follow(prompt: Prompt) -> str:
    """The final turn of an agent that knows nothing but what it reads."""
    key = prompt.text[1:-1]
    for _ in range(LOOKUP.max_turns - 1):
        call = INSTANT.parse(f">{key};")
        assert call is not None
        try:
            returned = await INSTANT.tools[call.tool](call.argument)
        except ToolError as error:
            returned = str(error)
        if not returned.startswith("=@"):
            return f"A{returned[1:]}"
        key = returned[2:-1]
    return ""


async def play(spans: list[Span]) -> float:
    """Make the calls of a demonstration; what the tool returns must be what the demonstration says it does."""
    question, *turns = spans
    key = question.text[1:-1]
    while True:
        said, *turns = turns
        assert said.generated
        assert len(said.text) <= SKILLED.turn_tokens
        call = SKILLED.parse(said.text)
        if call is None:
            assert not turns
            return float(SKILLED.reward(Prompt(key, question.text, answer_of(key)), said.text))
        returned, *turns = turns
        if returned.text == SKILLED.timeout_text:
            continue
        try:
            assert await SKILLED.tools[call.tool](call.argument) == returned.text
        except ToolError as error:
            assert str(error) == returned.text
