"""The protocol of routing policies: their inputs and answers.

Invariant: a call has the whole present state, the request and the healthy instances. An answer names one instance and
the reason for it. A policy learns about the past only from these calls, in their order. Lengths and loads are in
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from libra.trajectory import ToolStatus, Trajectory


class Instance(Protocol):
    """Properties of a healthy engine instance that policies may read."""

    @property
    def id(self) -> str:
        """Unique in the fleet."""

    @property
    def bucket(self) -> int:
        """Index of one of the fleet's limits."""

    @property
    def pace_class(self) -> int:
        """Class of speed: instances of one bucket and one class are about equally fast at equal loads."""

    @property
    def capacity_tokens(self) -> int:
        """Longest context that the instance serves."""

    @property
    def load_tokens(self) -> int:
        """Tokens of accepted work that is not finished."""

    @property
    def token_seconds(self) -> float | None:
        """Seconds to generate one token of one more sequence, in addition to all accepted work; sequences that do not
        fit into memory together alternate. For a lent instance, at its granted share of time. None: unknown.
        """

    @property
    def recall_rate(self) -> float:
        """Recalls per second that are expected from the lender; a recall moves the turns to other instances. 0: not
        lent."""

    @property
    def prompt_wait_seconds(self) -> float:
        """Seconds until another engine has computed a turn's prompt, so that this instance can generate. 0 if this
        instance computes prompts itself, since its load includes them.
        """


class Fleet(Protocol):
    """The instances to which a request may go, without unhealthy or stopping instances.

    A policy reads the fleet during one call and keeps no reference to it. So a fleet may be a live object whose
    instances change between calls. If instances change concurrently and copying is cheap, a fleet may be a `View`.
    """

    @property
    def instances(self) -> Sequence[Instance]:
        """Instances in any order, which changes only with the set of instances."""

    @property
    def limits(self) -> tuple[int, ...]:
        """Largest final context of each bucket, in tokens, shortest bucket first. There is at least one bucket."""

    @property
    def turn_tokens(self) -> int:
        """Tokens for which one turn needs room, in addition to its context."""


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
                    f"instance {instance.id!r} is in bucket {instance.bucket}, but there are {len(self.limits)} "
                    f"limits: add the bucket's limit, or move the instance"
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
    context_tokens: int  # context at the start of the turn, including the latest tool return
    task: str = ""  # kind of prompt; "": unknown
    # Time on the caller's clock, in seconds, by which the group must be complete so that training does not wait; None:
    # unknown.
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
    migrated: bool  # whether the previous turn, or an earlier part of this turn, ran on another instance
    reason: str
    priority: int = 0  # engines with priorities serve lower values first
    ask_again: int | None = None  # generated tokens of this turn at which to call `bucket_overrun`

    def __post_init__(self) -> None:
        if self.ask_again is not None and self.ask_again < 1:
            raise ValueError(f"ask_again is {self.ask_again}; it is a number of generated tokens, 1 or more")


class Policy(Protocol):
    """Chooses the instance of each turn, for one caller at a time. Equal calls in equal order return equal answers."""

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        """Place a turn that does not follow a tool return: the first turn, or a turn that must be placed again.

        Returns None if no healthy instance has room for the turn now; the caller waits and calls `place` again. The
        caller also calls `place` after None from `tool_returned`, since it passes each tool return only once.
        """

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        """Place the turn that follows a tool return. None has the same meaning as in `place`. Raises `ValueError` if
        the trajectory was never placed.
        """

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, fleet: Fleet) -> Placement | None:
        """Place an unfinished turn again, once it has generated the `ask_again` tokens of its placement. `request` is
        the request of that placement. None: the turn stays, and this method is not called again. A placement on the
        same instance: the turn stays, and this method is called again at `ask_again` generated tokens. A placement on
        another instance: the turn is stopped, and continues there after its generated tokens.
        """

    def finished(self, trajectory: Trajectory) -> None:
        """Learn from a finished trajectory, routed here or read from a log, and drop its routing state."""

    def forget(self, trajectory_id: str) -> None:
        """Drop the state of an abandoned trajectory without learning from it; no error if it was never placed."""

    def instance_gone(self, instance: str) -> None:
        """Record that an instance has stopped. Its prefixes are lost, even if an instance with the same name
        returns."""

    def snapshot(self) -> dict[str, Any]:
        """All state as JSON values, with a format number. The value shares no object with the policy."""

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> Self:
        """Make the policy from `snapshot`. Raises `ValueError` for a snapshot of another policy or format."""


def require_snapshot(snapshot: Mapping[str, Any], policy: str, format: int) -> None:
    """Raise `ValueError` unless `snapshot` is of this policy and format."""
    found = (snapshot.get("policy"), snapshot.get("format"))
    if found != (policy, format):
        raise ValueError(
            f"snapshot is of policy {found[0]!r} format {found[1]!r}, this is {policy!r} format {format}:"
            " restore it with the policy that wrote it, or replay the finished trajectories"
        )
