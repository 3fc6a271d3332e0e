"""The protocol of routing policies: their inputs and answers.

Invariant: a call carries the whole present state (the request and the healthy instances); an answer names one instance
and the reason for it. A policy learns of the past only through these same calls, in their order. Lengths and loads are
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from libra.trajectory import ToolStatus, Trajectory


class Instance(Protocol):
    """The properties of a healthy engine instance that policies may read."""

    @property
    def id(self) -> str:
        """Unique in the fleet."""

    @property
    def bucket(self) -> int:
        """Index of one of the fleet's limits."""

    @property
    def pace_class(self) -> int:
        """Instances of one bucket and one class are about equally fast at equal loads."""

    @property
    def capacity_tokens(self) -> int:
        """Longest context it serves."""

    @property
    def load_tokens(self) -> int:
        """Accepted and unfinished tokens of work."""

    @property
    def token_seconds(self) -> float | None:
        """Seconds to generate one token of one more sequence, in addition to all accepted work; sequences that do not
        fit together alternate. None: not known. For a lent instance, at the granted share of time."""

    @property
    def recall_rate(self) -> float:
        """Expected recalls per second by its lender, which move its turns to other instances; 0: not lent."""

    @property
    def prompt_wait_seconds(self) -> float:
        """Seconds until another engine has computed a turn's prompt and this one can generate; 0 if this engine
        computes prompts itself, as its load includes them."""


class Fleet(Protocol):
    """The instances a request may go to. An unhealthy or stopping instance is left out, not marked.

    A policy reads it during one call and keeps no reference to it. So a fleet may be a live object whose instances
    change between calls, or, if the instances change concurrently and copying is cheap, a `View` of one moment.
    """

    @property
    def instances(self) -> Sequence[Instance]:
        """Instances in any order, which stays the same as long as the set does."""

    @property
    def limits(self) -> tuple[int, ...]:
        """Largest final context of each bucket, in tokens, shortest bucket first. There is at least one bucket."""

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
    pace_class: int = 0

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
    task: str = ""  # kind of prompt; "": not known
    # Time on the caller's clock, in seconds, by which its group must be complete so that training need not wait; None:
    # not known.
    due: float | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.context_tokens < 0:
            raise ValueError(f"trajectory {self.trajectory_id!r}: prompt_tokens and context_tokens must be >= 0")


@dataclass(frozen=True, slots=True)
class ToolReturn:
    """The return of a tool call."""

    tool: str
    status: ToolStatus
    returned_tokens: int

    def __post_init__(self) -> None:
        if self.returned_tokens < 0:
            raise ValueError(f"tool {self.tool!r}: returned_tokens is {self.returned_tokens}, must be >= 0")


@dataclass(frozen=True, slots=True)
class Placement:
    """The instance of the next turn, with the reason."""

    instance: str
    bucket: int  # the bucket of that instance
    migrated: bool  # whether the previous turn, or this one so far, ran on another instance
    reason: str
    priority: int = 0  # lower is served first, by engines that serve by priority
    ask_again: int | None = None  # tokens generated in this turn at which to call `bucket_overrun`

    def __post_init__(self) -> None:
        if self.ask_again is not None and self.ask_again < 1:
            raise ValueError(f"ask_again is {self.ask_again}; it is a number of generated tokens, 1 or more")


class Policy(Protocol):
    """Chooses the instance of each turn. One caller at a time; equal calls in equal order give equal answers."""

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        """Place a turn that no tool return precedes: the first one, or one that must be placed again.

        None: no healthy instance can hold it now. The caller waits and calls `place` again, also when `tool_returned`
        answered None, since each tool return is passed only once.
        """

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        """Place the turn that follows a tool return. None as in `place`. Raises ValueError if the trajectory was never
        placed."""

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        """Place again an unfinished turn that has generated the `ask_again` tokens of its placement. `request` is the
        placed one. None: the turn stays, and this is not called again. A placement on its own instance: the turn stays,
        and this is called again at `ask_again` tokens from the turn's start. A placement on another instance: the turn
        is stopped, and continues there after its generated tokens."""

    def finished(self, trajectory: Trajectory) -> None:
        """Learn from a finished trajectory, routed here or read from a log, and drop its routing state."""

    def forget(self, trajectory_id: str) -> None:
        """Drop the state of an abandoned trajectory without learning from it; no error if it was never placed."""

    def instance_gone(self, instance: str) -> None:
        """The instance stopped and its prefixes are lost, even if one of the same name returns."""

    def snapshot(self) -> dict[str, Any]:
        """All state as JSON values, with a format number; shares nothing with the policy."""

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        """The policy of `snapshot`. Raises ValueError if the snapshot is of another policy or format."""


def require_snapshot(snapshot: Mapping[str, Any], policy: str, format: int) -> None:
    """Raise ValueError unless `snapshot` is of this policy and format."""
    found = (snapshot.get("policy"), snapshot.get("format"))
    if found != (policy, format):
        raise ValueError(
            f"snapshot is of policy {found[0]!r} format {found[1]!r}, this is {policy!r} format {format}:"
            " restore it with the policy that wrote it, or replay the finished trajectories"
        )
