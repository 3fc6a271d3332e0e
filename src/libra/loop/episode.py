"""Finished episodes, and the protocol of what makes them.

Invariant: the token lists of an episode have one entry per token, as it was given or sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from libra.environments.protocol import Prompt
from libra.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Episode:
    """A finished trajectory and the tokens it is made of. The four lists have one entry per token."""

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

    async def episode(
        self,
        id: str,
        prompt: Prompt,
        due: float,
        temperature: float,
        fresh: bool = False,
        seed: int | None = None,
        version: int = -1,
    ) -> Episode:
        """Run one episode. `due`: when it is needed, in seconds of the run; `fresh` keeps its KV apart from everything
        generated before; with a `seed` its sampling is drawn from that. It uses no weights older than `version`."""
        ...
