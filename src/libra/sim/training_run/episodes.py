"""Trajectories that the policy under training generates at each version, the order of their prompts, and groups drawn
from a log of real trajectories.

Invariant: a group is the same for every simulated system: the engine and the time of its generation change neither its
tokens nor its tools. The version at its start may change them: this is drift. Every prompt occurs once in each pass
over the data set, in an order that depends only on the seed and the pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libra.trajectory import Trajectory, truncate


class Episodes(Protocol):
    """Groups of trajectories, each of one prompt."""

    @property
    def samples_per_prompt(self) -> int:
        """Trajectories of a group."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of a trajectory's context."""
        ...

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        """The `number`-th group of a run, from 0, started under this version of the policy.

        Its trajectories have ids of their own in the run, a common `prompt_id`, and `version` as their
        `policy_version`. Equal arguments give equal groups; the same number under another version is the same draw at
        another stage of the drift.
        """
        ...


_ORDER, _SAMPLES = 0x6F72646572, 0x73616D706C6573  # streams of one seed


def generator_of(seed: int, *stream: int) -> np.random.Generator:
    """A generator that is independent of other streams of the seed, and reproducible."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *stream))))


def prompt_at(number: int, prompts: int, seed: int) -> int:
    """Index of the prompt of the `number`-th group, from 0. Each pass over the `prompts` prompts is shuffled."""
    if number < 0:
        raise ValueError(f"number is {number}; groups are counted from 0")
    epoch, position = divmod(number, prompts)
    return int(_order(epoch, prompts, seed)[position])


@lru_cache(maxsize=4)  # a run is in one pass at a time; the order is the same whether it is kept or made again
def _order(epoch: int, prompts: int, seed: int) -> NDArray[np.int64]:
    return generator_of(seed, _ORDER, epoch).permutation(prompts)


_Candidates = tuple[str, tuple[Trajectory, ...]]  # a prompt, and the trajectories from which its samples are drawn


@dataclass(frozen=True, slots=True)
class Resampled:
    """`Episodes` by bootstrap: a group is a prompt of the log, and its samples are drawn with replacement.

    They are drawn from the prompt's own finished trajectories. If the log has only one of a prompt, they are drawn from
    it and the `neighbours` - 1 finished trajectories of its task whose final contexts are nearest in logarithm:
    attempts at one prompt are assumed to differ like attempts of similar length. A borrowed sample keeps the prompt
    tokens of its own prompt, so prompt and trajectory lengths are related as in the log. Turns, tool returns, token
    counts and recorded seconds are unchanged, cut only at `max_context`; unrecorded values stay unrecorded. A log shows
    one policy, so groups are equal at every version. Unfinished trajectories are left out. Raises ValueError if none is
    finished.
    """

    log: tuple[Trajectory, ...] = field(repr=False)
    samples_per_prompt: int
    max_context: int  # tokens
    seed: int
    neighbours: int = 8
    _candidates: tuple[_Candidates, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("samples_per_prompt", self.samples_per_prompt, 1),
            ("max_context", self.max_context, 1),
            ("seed", self.seed, 0),
            ("neighbours", self.neighbours, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; give {least} or more")
        finished = [truncate(trajectory, self.max_context) for trajectory in self.log if trajectory.finished]
        if not finished:
            raise ValueError(f"none of {len(self.log)} trajectories is finished; give a log with at least one")
        # Derived once: a run asks for thousands of groups.
        object.__setattr__(self, "_candidates", _candidates(finished, self.neighbours))

    @property
    def prompts(self) -> int:
        """Different prompts in the log with a finished trajectory."""
        return len(self._candidates)

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        prompt_id, candidates = self._candidates[prompt_at(number, self.prompts, self.seed)]
        generator = generator_of(self.seed, _SAMPLES, number)
        count = len(candidates)
        # A product may be rounded up to the whole count.
        drawn = np.minimum(generator.random(self.samples_per_prompt) * count, count - 1).astype(np.int64)
        return tuple(
            replace(
                candidates[which],
                id=f"{number}/{sample}",
                prompt_id=prompt_id,
                policy_version=version,
                started_at=None,
            )
            for sample, which in enumerate(drawn.tolist())
        )


def _candidates(finished: Sequence[Trajectory], neighbours: int) -> tuple[_Candidates, ...]:
    """One entry for each prompt, in the order of its first occurrence in the log; its trajectories, shortest first."""
    by_prompt: defaultdict[str, list[Trajectory]] = defaultdict(list)
    by_task: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in finished:
        by_prompt[trajectory.prompt_id].append(trajectory)
        by_task[trajectory.task].append(trajectory)
    drawn_from = {
        prompt_id: own if len(own) > 1 else _nearest(own[0], by_task[own[0].task], neighbours)
        for prompt_id, own in by_prompt.items()
    }
    return tuple(
        (prompt_id, tuple(sorted(trajectories, key=lambda it: (it.final_context, it.id))))
        for prompt_id, trajectories in drawn_from.items()
    )


def _nearest(one: Trajectory, of_task: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """`one` and the `count` - 1 others nearest to it; ties by the distance of their places in `of_task`.

    In a truncated log, many have the longest context: with ties by id, all would borrow from the same few.
    """
    places = {trajectory.prompt_id: place for place, trajectory in enumerate(of_task)}
    own, size = places[one.prompt_id], len(of_task)

    def distance(other: Trajectory) -> tuple[float, int]:
        return abs(_log_length(other) - _log_length(one)), (places[other.prompt_id] - own) % size

    others = [trajectory for trajectory in of_task if trajectory.prompt_id != one.prompt_id]
    return [one, *sorted(others, key=distance)[: count - 1]]


def _log_length(trajectory: Trajectory) -> float:
    return math.log(max(trajectory.final_context, 1))
