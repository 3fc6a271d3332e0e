"""Requested and finished episodes, and the interface `EpisodeMaker`.

Invariant: the token lists of an episode have one entry per token, sampled or not.
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
    due: float  # latest time at which the run needs it, in seconds of the run
    temperature: float
    fresh: bool = False  # engines share no KV between it and earlier requests
    seed: int | None = None  # of the sampling; None: engines choose
    version: int = -1  # weights at the start of its group; engines with older weights may not generate it


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished trajectory with its tokens. The four lists have one entry per token."""

    trajectory: Trajectory
    tokens: list[int]
    generated: list[bool]
    logprobs: list[float]
    versions: list[int]  # of the weights that sampled each token; -1: not sampled
    reward: float
    turn_buckets: tuple[int, ...]  # bucket in which each turn ended
    branches: tuple[Episode, ...] = ()  # contexts with the same reward; none extends this one or another branch

    @property
    def contexts(self) -> tuple[Episode, ...]:
        """The episode and its branches."""
        return (self, *self.branches)


class EpisodeMaker(Protocol):
    """Plays episodes of one environment on the engines of a run."""

    @property
    def generated_tokens(self) -> int:
        """Tokens that all engines have generated up to now."""
        ...

    async def episode(self, asked: EpisodeRequest) -> Episode:
        """Run one episode."""
        ...
