"""Trajectories that the policy under training generates at each version, the order of their prompts, and groups drawn
from a log of real trajectories.

Invariant: a group is the same for every simulated system. The engine and the time of generation change neither its
tokens nor its tools; only the version at its start may do so, which is called drift. Every prompt occurs once in each
pass over the data set, in an order that depends only on the seed and the pass.
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
        """Number of trajectories in a group."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of a trajectory's context."""
        ...

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        """The group with this number in a run, from 0, started under `version` of the policy.

        Its trajectories have unique ids in the run, a common `prompt_id`, and `version` as their `policy_version`.
        Equal arguments give equal groups. The same number under another version is the same draw at another stage of
        the drift.
        """
        ...


_ORDER, _SAMPLES = 0x6F72646572, 0x73616D706C6573  # streams of one seed


def generator_of(seed: int, *stream: int) -> np.random.Generator:
    """A generator that is independent of other streams of the seed, and reproducible."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *stream))))


def prompt_at(number: int, prompts: int, seed: int) -> int:
    """Index of a group's prompt. `number` is the group's, from 0. Each pass over the `prompts` prompts is shuffled."""
    if number < 0:
        raise ValueError(f"number is {number}; give 0 or more, as groups are counted from 0")
    epoch, position = divmod(number, prompts)
    return int(_order(epoch, prompts, seed)[position])


@lru_cache(maxsize=4)  # a run is in one pass at a time
def _order(epoch: int, prompts: int, seed: int) -> NDArray[np.int64]:
    return generator_of(seed, _ORDER, epoch).permutation(prompts)


_Candidates = tuple[str, tuple[Trajectory, ...]]  # a prompt, and the trajectories from which its samples are drawn


@dataclass(frozen=True, slots=True)
class Resampled:
    """`Episodes` by bootstrap: a group is a prompt of the log, and its samples are drawn with replacement.

    Samples are drawn from the prompt's own finished trajectories. If the log has only one trajectory of a prompt, its
    `neighbours` - 1 nearest trajectories are drawn, too. These are finished trajectories of the same task, with the
    nearest logarithm of the final context: attempts at one prompt are assumed to differ like attempts of similar
    length. A borrowed sample keeps the prompt tokens of its own prompt, so prompt and trajectory lengths are related as
    in the log. Turns, tool returns, token counts and recorded seconds are unchanged, cut only at `max_context`;
    unrecorded values stay unrecorded. A log shows one policy, so groups are equal at every version. Unfinished
    trajectories are left out. Raises ValueError if no trajectory is finished.
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
        # Computed once, since a run asks for thousands of groups.
        object.__setattr__(self, "_candidates", _candidates(finished, self.neighbours))

    @property
    def prompts(self) -> int:
        """Number of prompts in the log with a finished trajectory."""
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
    """One entry per prompt, in the order of first occurrence in the log, with its trajectories, shortest first."""
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
    """`one` and its `count` - 1 nearest other trajectories. The distance in `of_task` breaks ties.

    In a truncated log, many trajectories have the longest context. If ids broke ties, all of these would borrow from
    the same few.
    """
    places = {trajectory.prompt_id: place for place, trajectory in enumerate(of_task)}
    own, size = places[one.prompt_id], len(of_task)

    def distance(other: Trajectory) -> tuple[float, int]:
        return abs(_log_length(other) - _log_length(one)), (places[other.prompt_id] - own) % size

    others = [trajectory for trajectory in of_task if trajectory.prompt_id != one.prompt_id]
    return [one, *sorted(others, key=distance)[: count - 1]]


def _log_length(trajectory: Trajectory) -> float:
    return math.log(max(trajectory.final_context, 1))
