"""Who makes a request, as a router sees it.

Invariant: a caller says of its turn what was known when that was placed, and goes on saying it until it is placed anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from libra.route import policy
from libra.sim.engine.chain import Chain
from libra.sim.engine.request import Request
from libra.sim.workload.calls import Call
from libra.trajectory import Trajectory


@dataclass(slots=True)
class Caller:
    """The owner of a request that a trajectory makes."""

    trajectory: Trajectory
    calls: tuple[Call, ...]  # all that the trajectory makes
    position: int  # in `calls`, of the one that the request is of
    generated_before: int = field(default=0, kw_only=True)  # tokens of the turn before this request was made
    placed_before: int = field(default=0, kw_only=True)  # those of them that a policy knew when it last placed the turn
    engine: int | None = field(default=None, kw_only=True)  # of its latest request; kept only where KV moves
    told: bool = field(default=False, kw_only=True)  # the policy knows of the return before this call
    due: float | None = field(default=None, kw_only=True)  # seconds by which its group has to be complete

    @property
    def call(self) -> Call:
        return self.calls[self.position]

    @property
    def last(self) -> bool:
        """Whether the trajectory makes no other call after this one."""
        return self.position == len(self.calls) - 1

    @property
    def generated_since(self) -> int:
        """Tokens of the turn before this request was made, and after the turn was last placed."""
        return self.generated_before - self.placed_before

    def routing_request(self) -> policy.Request:
        """The turn as it was last placed."""
        trajectory = self.trajectory
        return policy.Request(
            trajectory.id,
            trajectory.prompt_id,
            trajectory.prompt_tokens,
            self.call.context_tokens + self.placed_before,
            trajectory.task,
            self.due,
        )

    def returned(self) -> policy.ToolReturn | None:
        """The tool return that the request follows, unless the policy was told of it before."""
        return None if self.told else _returned_before(self.trajectory, self.calls, self.position)


@dataclass(slots=True)
class TrajectoryCaller(Caller):
    """A caller of a replayed trajectory: each turn is one request."""

    prompt: Chain  # what the trajectory began with
    first_number: int  # of the request of its first call

    @property
    def turn(self) -> int:
        return self.call.turn


def rest_of(request: Request, number: int, now: int) -> Request:
    """What is left of a request that was stopped, as a request of its own."""
    owner = request.owner
    if isinstance(owner, TrajectoryCaller):
        owner = replace(owner, generated_before=owner.generated_before + request.generated, told=True)
    return Request(
        number,
        now,
        request.prompt_tokens + request.generated,
        request.output_tokens - request.generated,
        chain=request.chain,
        priority=request.priority,
        cancel_at=request.cancel_at,
        owner=owner,
    )


def _returned_before(trajectory: Trajectory, calls: tuple[Call, ...], position: int) -> policy.ToolReturn | None:
    """The tool return before a call. A policy has not heard of a trajectory before its first request, so a return
    before that means nothing to it."""
    if position == 0:
        return None
    before = trajectory.turns[calls[position].turn - 1]
    if before.tool is None or before.status is None:
        return None
    return policy.ToolReturn(before.tool, before.status, before.returned_tokens)
