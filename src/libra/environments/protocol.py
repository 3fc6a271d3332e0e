"""The interface of a task for training an agent. No other part of Libra depends on the task.

Invariant: an environment defines the prompts, the tools and the reward of an answer; it never gets tokens, engines or
devices. Its methods are pure, except the tools.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

Tool = Callable[[str], Awaitable[str]]
"""A tool takes the argument text of a call and returns the text that the agent reads. It raises `ToolError` for an
error that the agent should see. The caller cancels it at the environment's deadline.
"""


class ToolError(Exception):
    """A tool call failed for a reason that the agent may learn from. The agent reads the message."""


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a demonstration: written by the agent (`generated`) or returned by a tool."""

    text: str
    generated: bool


class Environment(Protocol):
    """One task. `libra run` calls `prompts` once per split, then `parse`, the tools and `reward` for every episode.

    The properties may be plain attributes.
    """

    @property
    def name(self) -> str: ...

    @property
    def alphabet(self) -> str:
        """All characters of prompts, turns and returns, for the tokenizer of a tiny model."""
        ...

    @property
    def stop(self) -> str:
        """The character that ends a turn."""
        ...

    @property
    def tools(self) -> Mapping[str, Tool]: ...

    @property
    def deadline(self) -> float:
        """Seconds a tool may take before the call counts as timed out."""
        ...

    @property
    def timeout_text(self) -> str:
        """The text that the agent reads when a call timed out."""
        ...

    @property
    def error_text(self) -> str:
        """The text that the agent reads when a tool fails unexpectedly, or does not exist."""
        ...

    @property
    def turn_tokens(self) -> int:
        """Limit on the tokens of a turn; a longer turn is cut off."""
        ...

    @property
    def max_turns(self) -> int:
        """Limit on the turns of an episode; a longer episode ends without an answer."""
        ...

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        """`count` distinct prompts of `split` ("train" or "heldout"); no prompt is in both splits."""
        ...

    def parse(self, text: str) -> ToolCall | None:
        """The tool call in a generated turn; None if the turn is the final answer or has no valid call."""
        ...

    def reward(self, prompt: Prompt, text: str) -> float:
        """The reward of the final turn `text`, 0 to 1."""
        ...

    def demonstration(self, rng: random.Random) -> list[Span]:
        """One imperfect episode to imitate in the supervised warm-up, starting with its prompt."""
        ...
