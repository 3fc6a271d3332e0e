"""The store of the example of a plugged-in task, and that following it through the tool solves the task."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libra.config.run import load_config
from libra.environments.protocol import Prompt, ToolError
from libra.environments.registry import load_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = load_config(EXAMPLES / "lookup.yaml")
LOOKUP: Any = load_environment(CONFIG.environment, EXAMPLES)
INSTANT = replace(LOOKUP, latency=0.0)


def find(entry: str) -> str:
    """A key whose entry opens with `entry`; `-`: a key without one."""
    if entry == "-":
        return next(prompt.id for prompt in prompts() if prompt.id not in INSTANT.store)
    return next(key for key, found in INSTANT.store.items() if found.startswith(entry))


def prompts() -> list[Prompt]:
    found: list[Prompt] = INSTANT.prompts("train", 500, 0) + INSTANT.prompts("heldout", 200, 0)
    return found


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


def test_more_prompts_than_there_are_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"there are \d+ different heldout prompts, not 5000: ask for fewer"):
        INSTANT.prompts("heldout", 5000, 0)


def test_the_task_has_misses_and_chains_and_no_answer_that_is_always_right() -> None:
    calls = [len(calls_for(prompt.id)) for prompt in prompts()]
    assert set(calls) == {1, 2, 3, 4, 5, 6}
    missed = sum(prompt.answer == "-" for prompt in prompts()) / len(prompts())
    assert 0.2 < missed < 0.5


def test_an_agent_that_follows_the_store_through_the_tool_gets_every_answer() -> None:
    for prompt in prompts():
        assert INSTANT.reward(prompt, asyncio.run(follow(prompt))) == 1.0


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
