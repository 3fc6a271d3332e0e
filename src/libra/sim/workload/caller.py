"""Who makes a request, as a router sees it.

Invariant: a caller says of itself what was known when its request was made, and goes on saying it.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.route import policy
from libra.sim.engine.chain import Chain
from libra.sim.workload.calls import Call
from libra.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class TrajectoryCaller:
    """The owner of a request that a trajectory makes."""

    trajectory: Trajectory
    calls: tuple[Call, ...]  # all that the trajectory makes
    position: int  # of this one in `calls`
    prompt: Chain  # what the trajectory began with
    first_number: int  # of the request of its first call

    @property
    def call(self) -> Call:
        return self.calls[self.position]

    @property
    def turn(self) -> int:
        return self.call.turn

    @property
    def last(self) -> bool:
        return self.position == len(self.calls) - 1

    def routing_request(self) -> policy.Request:
        return policy.Request(
            self.trajectory.id, self.trajectory.prompt_id, self.trajectory.prompt_tokens, self.call.context_tokens
        )

    def returned(self) -> policy.ToolReturn | None:
        # A policy has not heard of a trajectory before its first request, so a return before that means nothing to it.
        if self.position == 0:
            return None
        before = self.trajectory.turns[self.turn - 1]
        if before.tool is None or before.status is None:
            return None
        return policy.ToolReturn(before.tool, before.status, before.returned_tokens)
