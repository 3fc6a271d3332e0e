"""What the policy under training generates, at every stage of it, and in which order prompts come up.

Invariant: a group is the same for every system that is simulated: who generates it, when and where changes neither its
tokens nor its tools, but the version it starts under may, as that is what drift means. Every prompt comes up once in
each pass over the data set, in an order that depends on nothing but the seed and the pass.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from libra.trajectory import Trajectory


class Episodes(Protocol):
    """Groups of trajectories, each of one prompt."""

    @property
    def samples_per_prompt(self) -> int:
        """Trajectories of a group."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens that no trajectory outgrows."""
        ...

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        """The group that is started as the `number`-th of a run, from 0, under this version of the policy.

        Its trajectories have ids of their own in the run, a common `prompt_id`, and `version` as their
        `policy_version`. Equal arguments give equal groups; the same number under another version is the same draw at
        another stage of the drift.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Name, distributions, parameters and seed, as JSON values."""
        ...


_STREAM = 0x6F72646572  # sets these draws apart from others of the same seed


def prompt_at(number: int, prompts: int, seed: int) -> int:
    """Index of the prompt of the `number`-th group, from 0, where each pass over `prompts` of them is shuffled."""
    if number < 0:
        raise ValueError(f"number is {number}; groups are counted from 0")
    if prompts < 1:
        raise ValueError(f"prompts is {prompts}; a data set has 1 or more")
    if seed < 0:
        raise ValueError(f"seed is {seed}; give 0 or more")
    epoch, position = divmod(number, prompts)
    return int(_order(epoch, prompts, seed)[position])


@lru_cache(maxsize=4)  # a run is in one pass at a time; the order is the same whether it is kept or made again
def _order(epoch: int, prompts: int, seed: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, _STREAM, epoch)))).permutation(prompts)
