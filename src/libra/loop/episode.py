"""Requested and finished episodes, and the interface of their makers.

Invariant: the token lists of an episode have one entry per given or sampled token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from libra.environments.protocol import Prompt
from libra.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """A requested episode."""

    id: str
    prompt: Prompt
    due: float  # when it is needed, in seconds of the run
    temperature: float
    fresh: bool = False  # its KV is kept apart from everything generated before
    seed: int | None = None  # of the sampling; None: engines draw as they go
    version: int = -1  # of the weights that its group was started under: older ones may not make it


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished trajectory with its tokens. The four lists have one entry per token."""

    trajectory: Trajectory
    tokens: list[int]
    generated: list[bool]
    logprobs: list[float]
    versions: list[int]  # -1 where not generated
    reward: float
    turn_buckets: tuple[int, ...]  # bucket in which each turn ended
    branches: tuple[Episode, ...] = ()  # of the same reward: contexts that do not extend this one, nor each other

    @property
    def contexts(self) -> tuple[Episode, ...]:
        """The episode and its branches."""
        return (self, *self.branches)


class EpisodeMaker(Protocol):
    """Plays episodes of one environment on the engines of a run."""

    @property
    def generated_tokens(self) -> int:
        """Tokens so far, of all engines."""
        ...

    async def episode(self, asked: EpisodeRequest) -> Episode:
        """Run one episode."""
        ...
