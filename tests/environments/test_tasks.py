"""What every task keeps to, for the one that is built in and the one of the examples: splits, alphabet, time-outs, and
that doing everything right is worth 1."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from libra.config.run import RunConfig, load_config
from libra.environments.protocol import Prompt, Span, ToolCall, ToolError
from libra.environments.registry import load_environment

EXAMPLES = Path(__file__).parents[2] / "examples"


def follow_store(key: str) -> str:
    """To its end, without the environment's own code."""
    store = TASKS["lookup"].instant.store
    while store.get(key, "-").startswith("@"):
        key = store[key][1:]
    return str(store.get(key, "-"))


def left_to_right(expression: str) -> str:
    """What arithmetic gives, without the environment's own code."""
    terms = expression.replace("+", " + ").replace("-", " - ").replace("*", " * ").replace("/", " // ").split()
    value = int(terms[0])
    for operator, right in zip(terms[1::2], terms[2::2], strict=True):
        if operator == "//" and int(right) == 0:
            return "!"
        value = eval(f"({value}) {operator} {right}")
    return str(value)


@dataclass(frozen=True)
class Task:
    config: RunConfig
    instant: Any  # its tool answers at once
    answer_of: Callable[[str], str]  # by the id of a prompt
    call: str  # a well-formed one
    most_guessed: int  # right answers of 300 unskilled demonstrations


def task(name: str, answer_of: Callable[[str], str], call: str, most_guessed: int) -> Task:
    config = load_config(EXAMPLES / f"{name}.yaml")
    environment: Any = load_environment(config.environment, EXAMPLES)
    return Task(config, replace(environment, latency=0.0), answer_of, call, most_guessed)


TASKS = {
    "calculator": task("calculator", left_to_right, "12+34", 30),
    "lookup": task("lookup", follow_store, "bead", 150),
}
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())


@every_task
def test_a_call_can_take_longer_than_the_deadline(task: Task) -> None:
    slow = replace(task.instant, latency=1e9, deadline=0.001)
    [tool] = slow.tools.values()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(tool(task.call), slow.deadline))


@every_task
def test_parse(task: Task) -> None:
    [tool], call = task.instant.tools, task.call
    assert task.instant.parse(f">{call};") == ToolCall(tool, call)
    assert task.instant.parse(">;") == ToolCall(tool, "")
    for text in ("A46;", f">{call}", f"{call};", ""):  # an answer, a turn that was cut off before the stop
        assert task.instant.parse(text) is None


@every_task
def test_reward(task: Task) -> None:
    for answer, text, wanted in (
        ("46", "A46;", 1.0),
        ("46", "A4;", 0.0),
        ("46", "A46", 0.0),
        ("46", "46;", 0.0),
        ("-", "A-;", 1.0),
        ("46", "A-;", 0.0),
        ("-", "", 0.0),
    ):
        assert task.instant.reward(Prompt("p", "Qq;", answer), text) == wanted


@every_task
def test_prompts_are_deterministic_distinct_and_never_in_both_splits(task: Task) -> None:
    prompts = task.instant.prompts
    train, heldout = prompts("train", 400, seed=1), prompts("heldout", 200, seed=1)
    assert prompts("train", 400, seed=1) == train != prompts("train", 400, seed=2)
    ids = {prompt.id for prompt in train}
    assert len(ids) == len(train) == 400
    assert ids.isdisjoint(prompt.id for prompt in [*heldout, *prompts("heldout", 200, seed=2)])


@every_task
def test_answers_are_what_following_the_rules_gives(task: Task) -> None:
    prompts = task.instant.prompts("train", 400, seed=0) + task.instant.prompts("heldout", 200, seed=0)
    assert [prompt.answer for prompt in prompts] == [task.answer_of(prompt.id) for prompt in prompts]
    assert {prompt.answer for prompt in prompts} & {"!", "-"}


@every_task
def test_everything_the_agent_can_meet_is_in_the_alphabet_and_fits_the_engines(task: Task) -> None:
    rng, environment = random.Random(0), task.instant
    episodes = [environment.demonstration(rng) for _ in range(1000)]
    texts = [span.text for spans in episodes for span in spans]
    texts += [prompt.text + prompt.answer for prompt in environment.prompts("train", 200, seed=0)]
    texts += [environment.timeout_text, environment.error_text, environment.stop]
    assert set("".join(texts)) <= set(environment.alphabet)
    longest = max(shape.max_model_len for shape in task.config.engines.values())
    assert max(sum(len(span.text) for span in spans) for spans in episodes) <= longest


@every_task
def test_a_skilled_demonstration_played_with_the_real_tool_is_worth_1(task: Task) -> None:
    rng, skilled = random.Random(0), replace(task.instant, skill=1.0)
    assert {asyncio.run(play(task, skilled.demonstration(rng))) for _ in range(300)} == {1.0}


@every_task
def test_unskilled_demonstrations_are_mostly_wrong(task: Task) -> None:
    rng, unskilled = random.Random(0), replace(task.instant, skill=0.0)
    spans = [unskilled.demonstration(rng) for _ in range(300)]
    right = sum(last.text == f"A{task.answer_of(question.text[1:-1])};" for question, *_, last in spans)
    assert right < task.most_guessed


async def play(task: Task, spans: list[Span]) -> float:
    """Make the calls of a demonstration; what the tool returns must be what the demonstration says it does."""
    environment, (question, *turns) = task.instant, spans
    asked = question.text[1:-1]
    while True:
        said, *turns = turns
        assert said.generated
        assert len(said.text) <= environment.turn_tokens
        call = environment.parse(said.text)
        if call is None:
            assert not turns
            return float(environment.reward(Prompt(asked, question.text, task.answer_of(asked)), said.text))
        returned, *turns = turns
        if returned.text == environment.timeout_text:
            continue
        try:
            assert await environment.tools[call.tool](call.argument) == returned.text
        except ToolError as error:
            assert str(error) == returned.text
