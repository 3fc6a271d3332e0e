"""The interface of a task that plays its own episodes, and asks the run for completions over HTTP.

Invariant: such a task sees a chat API, and no tokens, engines or devices. All that it asks in one
`play` is one episode.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, SupportsFloat, TypeVar, runtime_checkable

from libra.config.run import ConfigError
from libra.environments.protocol import Prompt

_HELD_OUT = 5  # every fifth task is never trained on

T = TypeVar("T")


class EpisodeFailedError(RuntimeError):
    """An episode that has no reward, for a reason that is not the model's."""


def as_reward(value: object) -> float:
    """The reward that an environment has given. Raises `EpisodeFailedError` if it is no finite number."""
    if not isinstance(value, SupportsFloat) or not math.isfinite(reward := float(value)):
        raise EpisodeFailedError(f"its reward is {value!r:.80}: give a finite number")
    return reward


@dataclass(frozen=True, slots=True)
class Seat:
    """The model as one episode has it."""

    server: str  # base URL of OpenAI's API; a request says by X-Session-ID of which session it is
    session: str  # of this attempt at the episode, and no other
    key: str  # bearer token

    @property
    def url(self) -> str:
        """Base URL of OpenAI's API for this episode alone, where requests need no X-Session-ID."""
        return f"{self.server.removesuffix('/v1')}/{self.session}/v1"


@runtime_checkable
class ServedEnvironment(Protocol):
    """One task. `libra run` calls `prompts` once per split, and `play` for every episode, many at a time.

    The properties may be plain attributes.
    """

    @property
    def name(self) -> str: ...

    @property
    def turn_tokens(self) -> int:
        """Most tokens of a turn, which is cut off there."""
        ...

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        """`count` distinct prompts of `split` ("train" or "heldout"); no prompt is in both splits."""
        ...

    def opened(self, logs: Path) -> AbstractAsyncContextManager[object]:
        """Entered for the time in which episodes are played. `logs`: the directory of the run's logs."""
        ...

    async def play(self, prompt: Prompt, seat: Seat) -> float:
        """Play one episode; returns its reward. What it raises counts as a failure of this task, not of the model."""
        ...


def split_of(tasks: Sequence[T], split: str, count: int, seed: int) -> list[T]:
    """`count` of the tasks, in an order that follows from `seed`; one task in five is held out, whatever the seed.
    Raises ConfigError if there are fewer."""
    order = list(tasks)
    random.Random("held out").shuffle(order)
    most = len(order) // _HELD_OUT
    of_split = order[:most] if split == "heldout" else order[most:]
    if count > len(of_split):
        raise ConfigError(
            f"environment.{split}_prompts is {count}, and that split has {len(of_split)} of {len(order)} tasks: give"
            f" at most {len(of_split)}"
        )
    random.Random(f"{split}:{seed}").shuffle(of_split)
    return of_split[:count]
