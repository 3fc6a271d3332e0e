"""Parameters of tasks of one kind: their prompts, the lengths of attempts at them, and the returns of their tools.

Invariant: shares are probabilities, and every distribution has a finite median and spread. A run's seed and number of
steps are not part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from libra.trajectory import ToolStatus

_STRICT = ConfigDict(extra="forbid")
_TOLERANCE = 1e-9  # of a sum of shares

# Checked as a file is read.
Median = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Sigma = Annotated[float, Field(ge=0, le=10)]  # ten such deviations of an exponent are still a finite number
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Attempts of similar length. They generate exp(N(log `median`, `sigma`^2)) tokens in all, in about
    exp(N(log `turns_median`, `turns_sigma`^2)) turns. Of all attempts they are `first_share` at the start of the drift
    and `last_share` at its end."""

    __pydantic_config__ = _STRICT

    median: Median  # generated tokens
    sigma: Sigma
    turns_median: Median
    turns_sigma: Sigma
    first_share: Share
    last_share: Share


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
    typical_until: Median  # generated tokens
    share: Annotated[float, Field(gt=0, le=1)]
    returned_median: Median
    returned_sigma: Sigma
    seconds_median: Positive
    seconds_sigma: Sigma


@dataclass(frozen=True, slots=True)
class TaskShape:
    """The parameters of `DriftingTasks`.

    A prompt is of one of `tasks`, as likely as any other. Its difficulty is its task's plus noise, and an attempt's is
    its prompt's plus noise. Of the variance of an attempt's difficulty, `task_share` is between tasks and
    `prompt_share` between prompts of one task. Attempts are ranked into `lengths`, shortest class first, by difficulty.
    """

    __pydantic_config__ = _STRICT

    tasks: tuple[str, ...]
    prompts: Count  # in the data set
    task_share: Share
    prompt_share: Share
    prompt_median: Median  # tokens; a prompt has exp(N(log `prompt_median`, `prompt_sigma`^2)) of them
    prompt_sigma: Sigma
    prompt_correlation: Annotated[float, Field(ge=-1, le=1)]  # of the log of a prompt's tokens with its difficulty
    lengths: tuple[LengthClass, ...]
    growth: Positive  # factor on the generated tokens of every class over the whole drift, geometric in between
    max_turns: Count
    turn_sigma: Sigma  # turns of a trajectory generate shares of its tokens that are lognormal before they are scaled
    tools: tuple[ToolOutcome, ...]
    returned_limit: Count  # tokens; a longer return is cut
    seconds_limit: Positive  # a tool that takes longer is stopped
    tool_signal: Share  # probability that a tool return is typical of what remains; else it is any of them
    samples_per_prompt: Count
    max_context: Annotated[int, Field(ge=2)]  # tokens

    def __post_init__(self) -> None:
        if not self.tasks or not self.lengths or not self.tools:
            raise ValueError("tasks, lengths and tools must each have one entry or more")
        if self.task_share + self.prompt_share > 1:
            raise ValueError("task_share and prompt_share are more than 1 together; they are parts of one variance")
        if self.task_share > 0 and len(self.tasks) == 1:
            raise ValueError(
                "task_share is above 0, but one task differs from no other: name more tasks, or set it to 0"
            )
        _check_sum("first_share of lengths", (each.first_share for each in self.lengths))
        _check_sum("last_share of lengths", (each.last_share for each in self.lengths))
        _check_sum("share of tools", (each.share for each in self.tools))

    def class_shares(self, progress: float) -> tuple[float, ...]:
        """Share of each class at this point of the drift, 0 to 1: on the straight line between its two ends."""
        return tuple(each.first_share + (each.last_share - each.first_share) * progress for each in self.lengths)


def _check_sum(field: str, shares: Iterable[float]) -> None:
    total = sum(shares)
    if abs(total - 1) > _TOLERANCE:
        raise ValueError(f"{field} add up to {total}; scale them so that they add up to 1")
