"""The interface of a task that plays its own episodes, and asks the run for completions over HTTP.

Invariant: a task uses a chat API, and gets no tokens, engines or devices. All requests of one `play` form one episode.
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

_HELD_OUT = 5  # every fifth task is held out

T = TypeVar("T")


class EpisodeFailedError(RuntimeError):
    """An episode failed without a reward, through no fault of the model."""


def as_reward(value: object, environment: str, prompt: str) -> float:
    """`value` as the reward that an environment gives for a prompt. `environment` is a name, and `prompt` an id, both
    for the message. Raises `EpisodeFailedError` if the value is not a finite number.
    """
    if not isinstance(value, SupportsFloat) or not math.isfinite(reward := float(value)):
        raise EpisodeFailedError(
            f"environment {environment}: the reward of {prompt} is {value!r:.80}; return a finite number"
        )
    return reward


@dataclass(frozen=True, slots=True)
class Seat:
    """Access to the model for one episode."""

    server: str  # base URL of OpenAI's API; X-Session-ID names the session of a request
    session: str  # unique for this attempt at the episode
    key: str  # bearer token

    @property
    def url(self) -> str:
        """Base URL of OpenAI's API for only this episode; its requests need no X-Session-ID."""
        return f"{self.server.removesuffix('/v1')}/{self.session}/v1"


@runtime_checkable
class ServedEnvironment(Protocol):
    """One task. `libra run` calls `prompts` once per split, and `play` for each episode, with many calls at a time.

    The properties may be plain attributes.
    """

    @property
    def name(self) -> str: ...

    @property
    def turn_tokens(self) -> int:
        """Limit on the tokens of a turn; a longer turn is cut off."""
        ...

    def prompts(self, split: str, count: int, seed: int) -> list[Prompt]:
        """`count` distinct prompts of `split` ("train" or "heldout"); no prompt is in both splits."""
        ...

    def opened(self, logs: Path) -> AbstractAsyncContextManager[object]:
        """Context in which episodes are played. `logs` is the directory of the run's logs."""
        ...

    async def play(self, prompt: Prompt, seat: Seat) -> float:
        """Play one episode; returns its reward. An exception counts as a failure of the task, not of the model."""
        ...


def split_of(tasks: Sequence[T], split: str, count: int, seed: int) -> list[T]:
    """`count` tasks of `split`, in an order that depends on `seed`; the held-out fifth does not depend on the seed.
    Raises ConfigError if the split has fewer tasks.
    """
    order = list(tasks)
    random.Random("held out").shuffle(order)
    most = len(order) // _HELD_OUT
    of_split = order[:most] if split == "heldout" else order[most:]
    if count > len(of_split):
        raise ConfigError(
            f"environment.{split}_prompts is {count}, but this split has {len(of_split)} of {len(order)} tasks: give"
            f" at most {len(of_split)}"
        )
    random.Random(f"{split}:{seed}").shuffle(of_split)
    return of_split[:count]
