"""What a routing policy is asked and what it answers.

Invariant: a question carries everything about the present (the request and the healthy instances), an answer names one
instance and the evidence for it; what a policy knows of the past it learned through these same calls, in their order.
Lengths and loads are tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from libra.trajectory import ToolStatus, Trajectory


class Instance(Protocol):
    """What a policy may know of a healthy engine instance."""

    @property
    def id(self) -> str:
        """Unique in the fleet."""

    @property
    def bucket(self) -> int:
        """Index of one of the fleet's limits."""

    @property
    def capacity_tokens(self) -> int:
        """Longest context it serves."""

    @property
    def load_tokens(self) -> int:
        """Tokens of work it has accepted and not finished."""

    @property
    def token_seconds(self) -> float | None:
        """Seconds in which it would generate one token of one more sequence, with all the work that it has accepted:
        where that does not fit at once, sequences take turns. None: not known. Of one that is lent, as its lender
        grants it time."""

    @property
    def recall_rate(self) -> float:
        """How often a second its lender is expected to want it back, for its turns to go on elsewhere; 0: not lent."""

    @property
    def prompt_wait_seconds(self) -> float:
        """Seconds in which a turn's prompt comes to be computed elsewhere, before anything is generated here; 0 where
        the engine that generates computes prompts, which its load says."""


class Fleet(Protocol):
    """The instances a request may go to. A sick or stopping instance is left out, not marked.

    A policy reads it during one call and keeps nothing of it. So a fleet may be a live object whose instances change
    between calls, or a `View` of one moment where copying it is cheap and what changes it runs at the same time.
    """

    @property
    def instances(self) -> Sequence[Instance]:
        """In any order, but the same order as long as the same instances are in it."""

    @property
    def limits(self) -> tuple[int, ...]:
        """Largest final context of each bucket, at least one, shortest bucket first."""

    @property
    def turn_tokens(self) -> int:
        """Room that one turn needs beyond its context."""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An `Instance` at the moment of a decision."""

    id: str
    bucket: int
    capacity_tokens: int
    load_tokens: int
    token_seconds: float | None = None
    recall_rate: float = 0.0
    prompt_wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.bucket < 0:
            raise ValueError(f"instance {self.id!r}: bucket is {self.bucket}, must be >= 0")
        if self.capacity_tokens <= 0:
            raise ValueError(f"instance {self.id!r}: capacity_tokens is {self.capacity_tokens}, must be > 0")
        if self.load_tokens < 0:
            raise ValueError(f"instance {self.id!r}: load_tokens is {self.load_tokens}, must be >= 0")
        if self.token_seconds is not None and not 0 <= self.token_seconds < math.inf:
            raise ValueError(f"instance {self.id!r}: token_seconds is {self.token_seconds}, must be finite and >= 0")
        for name, number in (("recall_rate", self.recall_rate), ("prompt_wait_seconds", self.prompt_wait_seconds)):
            if not 0 <= number < math.inf:
                raise ValueError(f"instance {self.id!r}: {name} is {number}, must be finite and >= 0")


@dataclass(frozen=True, slots=True)
class View:
    """A `Fleet` at the moment of a decision."""

    instances: tuple[InstanceView, ...]
    limits: tuple[int, ...]
    turn_tokens: int

    def __post_init__(self) -> None:
        if not self.limits:
            raise ValueError("limits is empty: give the largest final context of at least one bucket")
        if any(longer <= shorter for shorter, longer in zip(self.limits, self.limits[1:], strict=False)):
            raise ValueError(f"limits {self.limits} must rise strictly: list the buckets shortest first")
        if self.turn_tokens < 0:
            raise ValueError(f"turn_tokens is {self.turn_tokens}, must be >= 0")
        seen = set()
        for instance in self.instances:
            if instance.bucket >= len(self.limits):
                raise ValueError(
                    f"instance {instance.id!r} is in bucket {instance.bucket}, but limits name {len(self.limits)}:"
                    " add the bucket's limit, or move the instance"
                )
            if instance.id in seen:
                raise ValueError(f"instance {instance.id!r} is listed twice: ids must be unique")
            seen.add(instance.id)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """The next turn of one trajectory."""

    trajectory_id: str
    prompt_id: str
    prompt_tokens: int
    context_tokens: int  # context at the start of the turn, the latest tool return included
    task: str = ""  # what kind of prompt it is; "": not known
    # Seconds on the caller's clock by which its group has to be complete, for training not to wait; None: not known.
    due: float | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.context_tokens < 0:
            raise ValueError(f"trajectory {self.trajectory_id!r}: prompt_tokens and context_tokens must be >= 0")


@dataclass(frozen=True, slots=True)
class ToolReturn:
    """What came back from a tool."""

    tool: str
    status: ToolStatus
    returned_tokens: int

    def __post_init__(self) -> None:
        if self.returned_tokens < 0:
            raise ValueError(f"tool {self.tool!r}: returned_tokens is {self.returned_tokens}, must be >= 0")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the next turn runs, and why."""

    instance: str
    bucket: int  # the bucket of that instance
    migrated: bool  # the previous turn, or what there is of this one, ran on another instance
    reason: str
    priority: int = 0  # lower is served first, by engines that serve by priority
    ask_again: int | None = None  # tokens generated in this turn after which `bucket_overrun` wants to be asked

    def __post_init__(self) -> None:
        if self.ask_again is not None and self.ask_again < 1:
            raise ValueError(f"ask_again is {self.ask_again}; it is a number of generated tokens, 1 or more")


class Policy(Protocol):
    """Decides where each turn runs. One caller at a time; same calls in the same order, same answers."""

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        """Place a turn that no tool return precedes: the first one, or one that must be placed again.

        None: no healthy instance can hold it now. The caller waits and calls `place` again, also when it was
        `tool_returned` that answered None, since a tool return is told once.
        """

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        """Place the turn that follows a tool return. None as for `place`; `ValueError` if it was never placed."""

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        """What becomes of a turn that has generated the `ask_again` tokens of its placement, and goes on.

        `request` is the one that was placed. None: it stays, and nobody asks again. A placement on its own instance:
        it stays, and `ask_again` says when to ask next, counted from the turn's start. One on another instance: it is
        stopped, and goes on there from what it has generated.
        """

    def finished(self, trajectory: Trajectory) -> None:
        """Learn from a finished trajectory, routed here or read from a log, and let go of its routing state."""

    def forget(self, trajectory_id: str) -> None:
        """Let go of an abandoned trajectory without learning from it; no error if it was never placed."""

    def instance_gone(self, instance: str) -> None:
        """The instance stopped and its prefixes are lost, even if one of the same name comes back."""

    def snapshot(self) -> dict[str, Any]:
        """All state as JSON values, with a format number; shares nothing with the policy."""

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        """The policy that `snapshot` was taken of. `ValueError` if it is of another policy or format."""


def require_snapshot(snapshot: Mapping[str, Any], policy: str, format: int) -> None:
    """Raise ValueError unless `snapshot` says that it is of this policy and format."""
    found = (snapshot.get("policy"), snapshot.get("format"))
    if found != (policy, format):
        raise ValueError(
            f"snapshot is of policy {found[0]!r} format {found[1]!r}, this is {policy!r} format {format}:"
            " restore it with the policy that wrote it, or replay the finished trajectories"
        )
