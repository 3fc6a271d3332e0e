"""Causes of device time. Every second of every worker has exactly one cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

_NAMED = 0.005  # causes with a smaller share of the time are shown as "other"


class Cause(StrEnum):
    """Causes of device time, in the order of charts and lists: work, overhead, waiting, no duty."""

    GENERATING = "generating"
    COMPUTING = "computing"
    EXCHANGING = "exchanging"
    PUBLISHING = "publishing"
    LOADING = "loading"
    CHECKPOINTING = "checkpointing"
    REDOING = "redoing"
    ROLLOUT_BOUND = "rollout_bound"
    REPLICA_BOUND = "replica_bound"
    TRAINING_BOUND = "training_bound"
    TOOL_BOUND = "tool_bound"
    NO_WORK = "no_work"
    BOUNDARY = "boundary"
    STARTING = "starting"
    MOVING = "moving"
    FAILED = "failed"
    IDLE = "idle"
    EVALUATING = "evaluating"

    @property
    def words(self) -> str:
        """The phrase that follows a share, as in "18 % rollout-bound"."""
        return _WORDS[self][0]

    @property
    def meaning(self) -> str:
        return _WORDS[self][1]


_WORDS: dict[Cause, tuple[str, str]] = {
    Cause.GENERATING: ("generating", "the engine has turns"),
    Cause.COMPUTING: ("computing", "forward, backward, optimiser"),
    Cause.EXCHANGING: ("exchanging gradients", "all-reduce over the replicas"),
    Cause.PUBLISHING: ("publishing", "trainers, until all engines hold the new weights"),
    Cause.LOADING: ("loading weights", "the engine pauses for them"),
    Cause.CHECKPOINTING: ("checkpointing", "trainers, while a checkpoint is written"),
    Cause.REDOING: ("redoing steps", "after a loss, or when a run is resumed"),
    Cause.ROLLOUT_BOUND: ("rollout-bound", "trainers wait for a batch"),
    Cause.REPLICA_BOUND: ("waiting for a replica", "the slowest one still computes"),
    Cause.TRAINING_BOUND: ("training-bound", "staleness lets no new group start before the step is made"),
    Cause.TOOL_BOUND: ("waiting for tools", "an engine has no turn, and its episodes wait for tools"),
    Cause.NO_WORK: ("without work", "the remaining turns run on other engines"),
    Cause.BOUNDARY: ("held at a boundary", "a worker joins or leaves between two steps"),
    Cause.STARTING: ("starting", "a process starts in an empty slot"),
    Cause.MOVING: ("moving", "from one role to another"),
    Cause.FAILED: ("failed", "its process is gone"),
    Cause.IDLE: ("without a role", "no process was started in the slot yet"),
    Cause.EVALUATING: ("evaluating", "no steps are made"),
}

WORK = (Cause.GENERATING, Cause.COMPUTING)
WAITED_FOR = {
    Cause.ROLLOUT_BOUND: "a batch to train on",
    Cause.REPLICA_BOUND: "the slowest replica",
    Cause.TRAINING_BOUND: "the step that lets new groups start",
    Cause.TOOL_BOUND: "tools",
    Cause.NO_WORK: "turns, which ran elsewhere",
    Cause.BOUNDARY: "workers that joined or left",
}


def total(workers: Iterable[Mapping[Cause, float]]) -> dict[Cause, float]:
    """Seconds by cause over all workers, in the order of the causes. Causes without seconds are left out."""
    rows = tuple(workers)
    sums = {cause: sum(row.get(cause, 0.0) for row in rows) for cause in Cause}
    return {cause: seconds for cause, seconds in sums.items() if seconds > 0}


def device_words(seconds: Mapping[Cause, float]) -> str:
    """Shares of device time by cause in one line, the largest first. Empty without device time.

    >>> device_words({Cause.COMPUTING: 6.1, Cause.ROLLOUT_BOUND: 1.8, Cause.GENERATING: 2.1, Cause.MOVING: 0.004})
    'devices: 61 % computing, 21 % generating, 18 % rollout-bound'
    """
    whole = sum(seconds.values())
    if whole <= 0:
        return ""
    parts = {cause: seconds.get(cause, 0.0) / whole for cause in Cause}
    named = [(cause.words, part) for cause, part in parts.items() if part >= _NAMED]
    named.sort(key=lambda it: -it[1])
    rest = 1 - sum(part for _, part in named)
    if rest >= _NAMED:
        named.append(("other", rest))
    return "devices: " + ", ".join(f"{100 * part:.0f} % {words}" for words, part in named)
