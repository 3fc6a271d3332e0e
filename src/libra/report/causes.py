"""What a device's second went to, with the words and the colour that each cause has wherever a person sees it.

Invariant: every second of every worker has exactly one cause, and every cause one colour: what makes tokens or
gradients is in full colour, what waits is pale, what changes or fails has the colour of that role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from libra.report.roles import ROLES
from libra.report.words import percent

_NAMED = 0.005  # share of the time below which a cause is among the others
_OTHERS = "other"


class Cause(StrEnum):
    """The order is that in which causes are stacked and listed: work, what it takes, waiting, no duty."""

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


WORK = (Cause.GENERATING, Cause.COMPUTING)
WAITED_FOR = {
    Cause.ROLLOUT_BOUND: "a batch to train on",
    Cause.REPLICA_BOUND: "the slowest replica",
    Cause.TRAINING_BOUND: "the step that lets new groups start",
    Cause.TOOL_BOUND: "tools",
    Cause.NO_WORK: "turns, which ran elsewhere",
    Cause.BOUNDARY: "workers that joined or left",
}
WAITING = tuple(WAITED_FOR)
_INK, _PAPER = "#1d2733", "#ffffff"


@dataclass(frozen=True, slots=True)
class CauseStyle:
    words: str  # after a share: "18 % rollout-bound"
    meaning: str
    colour: str  # in the HTML report
    chrome: str  # a name of the trace viewer's own palette
    ink: str = _INK  # of text written on `colour`


CAUSES: dict[Cause, CauseStyle] = {
    Cause.GENERATING: CauseStyle("generating", "the engine has turns", ROLES["rollout"].colour, "rail_response"),
    Cause.COMPUTING: CauseStyle(
        "computing", "forward, backward, optimiser", ROLES["train"].colour, "thread_state_iowait"
    ),
    Cause.EXCHANGING: CauseStyle(
        "exchanging gradients", "they are added up over the replicas", "#8c5a00", "rail_animation", _PAPER
    ),
    Cause.PUBLISHING: CauseStyle(
        "publishing", "trainers, until all engines hold the new weights", "#b5532a", "rail_load", _PAPER
    ),
    Cause.LOADING: CauseStyle("loading weights", "the engine stands still for them", "#0072b2", "rail_load", _PAPER),
    Cause.CHECKPOINTING: CauseStyle(
        "checkpointing", "trainers, while a checkpoint is written", "#5b4b8a", "rail_idle", _PAPER
    ),
    Cause.REDOING: CauseStyle("redoing steps", "after a loss, or when a run is resumed", "#8e1b2e", "bad", _PAPER),
    Cause.ROLLOUT_BOUND: CauseStyle("rollout-bound", "trainers wait for a batch", "#f6dda0", "thread_state_sleeping"),
    Cause.REPLICA_BOUND: CauseStyle(
        "waiting for a replica", "the slowest one still computes", "#dcb887", "thread_state_sleeping"
    ),
    Cause.TRAINING_BOUND: CauseStyle(
        "training-bound",
        "staleness lets no new group start before the step is made",
        "#bcdaf0",
        "thread_state_sleeping",
    ),
    Cause.TOOL_BOUND: CauseStyle(
        "waiting for tools",
        "an engine has no turn, and its episodes wait for tools",
        "#addac6",
        "thread_state_runnable",
    ),
    Cause.NO_WORK: CauseStyle(
        "without work", "what is left to generate runs on other engines", "#d3c8e3", "thread_state_unknown"
    ),
    Cause.BOUNDARY: CauseStyle(
        "held at a boundary", "somebody joins or leaves between two steps", "#cdc5aa", "thread_state_unknown"
    ),
    Cause.STARTING: CauseStyle("starting", "a process starts where there was none", ROLES["joining"].colour, "yellow"),
    Cause.MOVING: CauseStyle(
        "moving", "from one role to another", ROLES["draining"].colour, "thread_state_uninterruptible"
    ),
    Cause.FAILED: CauseStyle("failed", "its process is gone", ROLES["failed"].colour, "terrible", _PAPER),
    Cause.IDLE: CauseStyle("without a role", "no process was started there yet", ROLES["idle"].colour, "grey"),
    Cause.EVALUATING: CauseStyle("evaluating", "no steps are made", "#8a949e", "grey"),
}


def total(workers: Iterable[Mapping[Cause, float]]) -> dict[Cause, float]:
    """Seconds by cause over all workers, in the order of the causes; those without any are left out."""
    rows = tuple(workers)
    sums = {cause: sum(row.get(cause, 0.0) for row in rows) for cause in Cause}
    return {cause: seconds for cause, seconds in sums.items() if seconds > 0}


def device_words(seconds: Mapping[Cause, float]) -> str:
    """Where the device time went, in one line, the most first. Empty where there was none.

    >>> device_words({Cause.COMPUTING: 6.1, Cause.ROLLOUT_BOUND: 1.8, Cause.GENERATING: 2.1, Cause.MOVING: 0.004})
    'devices: 61 % computing, 21 % generating, 18 % rollout-bound'
    """
    whole = sum(seconds.values())
    if whole <= 0:
        return ""
    named = {cause: share / whole for cause, share in seconds.items() if share / whole >= _NAMED}
    parts = [
        f"{percent(share, 0)} {CAUSES[cause].words}"
        for cause, share in sorted(named.items(), key=lambda item: (-item[1], list(Cause).index(item[0])))
    ]
    rest = 1 - sum(named.values())
    return f"devices: {', '.join([*parts, f'{percent(rest, 0)} {_OTHERS}'] if rest >= _NAMED else parts)}"
