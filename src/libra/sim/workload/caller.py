"""Who makes a request, as a router sees it.

Invariant: a caller says of itself what was known when its request was made, and goes on saying it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from libra.route import policy
from libra.sim.engine.chain import Chain
from libra.sim.engine.request import Request
from libra.sim.workload.calls import Call
from libra.trajectory import Trajectory, Turn


class Caller(Protocol):
    """One turn of a trajectory."""

    @property
    def trajectory(self) -> Trajectory:
        """All of it, also what has not happened yet: nothing that a policy may ask before it happened."""
        ...

    @property
    def turn(self) -> int:
        """Its position in the trajectory, from 0."""
        ...

    @property
    def last(self) -> bool:
        """Whether the trajectory makes no request after this one."""
        ...

    def routing_request(self) -> policy.Request:
        """What a routing policy is asked."""
        ...

    def returned(self) -> policy.ToolReturn | None:
        """The tool return that precedes this turn. None: there is none, or no request was made before it."""
        ...


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


@dataclass(frozen=True, slots=True)
class OneTurnCaller:
    """Speaks for a request that nobody owns: a trajectory of that one turn."""

    request: Request

    @property
    def trajectory(self) -> Trajectory:
        asked = self.routing_request()
        return Trajectory(
            id=asked.trajectory_id,
            prompt_id=asked.prompt_id,
            task="request",
            prompt_tokens=asked.prompt_tokens,
            turns=(Turn(self.request.output_tokens, None, None, 0),),
            reward=None,
            policy_version=0,
            finished=True,
        )

    @property
    def turn(self) -> int:
        return 0

    @property
    def last(self) -> bool:
        return True

    def routing_request(self) -> policy.Request:
        """Requests whose chains fork from one chain are of one prompt."""
        name = f"request {self.request.number}"
        chain = self.request.chain
        prompt = name if chain is None or chain.parent is None else chain.parent.name
        return policy.Request(name, prompt, self.request.prompt_tokens, self.request.prompt_tokens)

    def returned(self) -> None:
        return None


def caller_of(request: Request) -> Caller:
    """Its owner, where that is a trajectory's turn; otherwise one who speaks for it."""
    return request.owner if isinstance(request.owner, TrajectoryCaller) else OneTurnCaller(request)
