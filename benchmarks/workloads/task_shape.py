"""Parameters of tasks of one kind: their prompts, the lengths of attempts at them, and the returns of their tools.

Invariant: shares are probabilities, and every distribution has a finite median and spread. A run's seed and number of
steps are not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import ConfigDict

from libra.trajectory import ToolStatus

_STRICT = ConfigDict(extra="forbid")
_TOLERANCE = 1e-9  # of a sum of shares


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Attempts of similar length. They generate exp(N(log `median`, `sigma`^2)) tokens in all, in about
    exp(N(log `turns_median`, `turns_sigma`^2)) turns. Of all attempts they are `first_share` at the start of the drift
    and `last_share` at its end."""

    __pydantic_config__ = _STRICT

    median: float  # generated tokens
    sigma: float
    turns_median: float
    turns_sigma: float
    first_share: float
    last_share: float

    def __post_init__(self) -> None:
        _check_median("median", self.median)
        _check_median("turns_median", self.turns_median)
        _check_sigma("sigma", self.sigma)
        _check_sigma("turns_sigma", self.turns_sigma)
        _check_share("first_share", self.first_share)
        _check_share("last_share", self.last_share)


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """One way in which a tool returns: exp(N(log `returned_median`, `returned_sigma`^2)) tokens after
    exp(N(log `seconds_median`, `seconds_sigma`^2)) seconds.

    It is typical if at most `typical_until` tokens remain to be generated, and more than the next smaller such limit of
    another outcome; the largest limit also covers all that is longer. Outcomes of equal limits are equally informative.
    `share` is its probability among all outcomes when the return does not depend on what remains.
    """

    __pydantic_config__ = _STRICT

    tool: str
    status: ToolStatus
    typical_until: float  # generated tokens
    share: float
    returned_median: float
    returned_sigma: float
    seconds_median: float
    seconds_sigma: float

    def __post_init__(self) -> None:
        _check_median("typical_until", self.typical_until)
        _check_median("returned_median", self.returned_median)
        if not 0 < self.seconds_median < math.inf:
            raise ValueError(f"seconds_median is {self.seconds_median}; set it to more than 0, and finite")
        _check_sigma("returned_sigma", self.returned_sigma)
        _check_sigma("seconds_sigma", self.seconds_sigma)
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it is a probability: more than 0, 1 at most")


@dataclass(frozen=True, slots=True)
class TaskShape:
    """The parameters of `DriftingTasks`.

    A prompt is of one of `tasks`, as likely as any other. Its difficulty is its task's plus noise, and an attempt's is
    its prompt's plus noise. Of the variance of an attempt's difficulty, `task_share` is between tasks and
    `prompt_share` between prompts of one task. Attempts are ranked into `lengths`, shortest class first, by difficulty.
    """

    __pydantic_config__ = _STRICT

    tasks: tuple[str, ...]
    prompts: int  # in the data set
    task_share: float
    prompt_share: float
    prompt_median: float  # tokens; a prompt has exp(N(log `prompt_median`, `prompt_sigma`^2)) of them
    prompt_sigma: float
    prompt_correlation: float  # of the log of a prompt's tokens with its difficulty
    lengths: tuple[LengthClass, ...]
    growth: float  # factor on the generated tokens of every class over the whole drift, geometric in between
    max_turns: int
    turn_sigma: float  # turns of a trajectory generate shares of its tokens that are lognormal before they are scaled
    tools: tuple[ToolOutcome, ...]
    returned_limit: int  # tokens; a longer return is cut
    seconds_limit: float  # a tool that takes longer is stopped
    tool_signal: float  # probability that a tool return is typical of what remains; else it is any of them
    samples_per_prompt: int
    max_context: int  # tokens

    def __post_init__(self) -> None:
        if not self.tasks or not self.lengths or not self.tools:
            raise ValueError("tasks, lengths and tools must each have one entry or more")
        for field, whole, least in (
            ("prompts", self.prompts, 1),
            ("max_turns", self.max_turns, 1),
            ("returned_limit", self.returned_limit, 1),
            ("samples_per_prompt", self.samples_per_prompt, 1),
            ("max_context", self.max_context, 2),
        ):
            if whole < least:
                raise ValueError(f"{field} is {whole}; give {least} or more")
        for field, share in (
            ("task_share", self.task_share),
            ("prompt_share", self.prompt_share),
            ("task_share + prompt_share", self.task_share + self.prompt_share),
            ("tool_signal", self.tool_signal),
        ):
            _check_share(field, share)
        if self.task_share > 0 and len(self.tasks) == 1:
            raise ValueError(
                "task_share is above 0, but one task differs from no other: name more tasks, or set it to 0"
            )
        if not -1 <= self.prompt_correlation <= 1:
            raise ValueError(f"prompt_correlation is {self.prompt_correlation}; give one from -1 to 1")
        _check_median("prompt_median", self.prompt_median)
        _check_sigma("prompt_sigma", self.prompt_sigma)
        _check_sigma("turn_sigma", self.turn_sigma)
        for field, number in (("growth", self.growth), ("seconds_limit", self.seconds_limit)):
            if not 0 < number < math.inf:
                raise ValueError(f"{field} is {number}; set it to more than 0, and finite")
        _check_sum("first_share of lengths", (each.first_share for each in self.lengths))
        _check_sum("last_share of lengths", (each.last_share for each in self.lengths))
        _check_sum("share of tools", (each.share for each in self.tools))

    def class_shares(self, progress: float) -> tuple[float, ...]:
        """Share of each class at this point of the drift, 0 to 1: on the straight line between its two ends."""
        return tuple(each.first_share + (each.last_share - each.first_share) * progress for each in self.lengths)


def _check_median(field: str, value: float) -> None:
    if not 1 <= value < math.inf:
        raise ValueError(f"{field} is {value}; set it to 1 or more, and finite")


def _check_sigma(field: str, value: float) -> None:
    # Ten such deviations of an exponent are still a finite number.
    if not 0 <= value <= 10:
        raise ValueError(f"{field} is {value}; set it from 0 to 10")


def _check_share(field: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{field} is {value}; it is a probability: 0 to 1")


def _check_sum(field: str, shares: Iterable[float]) -> None:
    total = sum(shares)
    if abs(total - 1) > _TOLERANCE:
        raise ValueError(f"{field} add up to {total}; scale them so that they add up to 1")
