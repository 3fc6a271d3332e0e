"""The calls that a trajectory makes, and who makes a request, as a router sees it.

Invariant: every turn that generates is one call, in order; a turn that generates nothing calls no engine, but its tool
takes its time and what it returned is in the context of the next call. A caller says of its turn what was known when
that was placed, and goes on saying it until it is placed anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from libra.route import policy
from libra.sim.clock import ticks
from libra.sim.engine.request import Chain, Request
from libra.trajectory import Trajectory, Turn

UNKNOWN_TOOL_SECONDS = 1.0  # a tool call whose duration was not recorded


@dataclass(frozen=True, slots=True)
class Call:
    """One generation, with what went before it since the last one."""

    turn: int  # position in the trajectory, from 0
    context_tokens: int  # the whole prompt of the call
    output_tokens: int
    delay: int  # ticks of tools between the end of the call before (or the trajectory's start) and this one
    rewritten: bool  # the context is not what came before with something added


def calls(trajectory: Trajectory, unknown_tool_seconds: float = UNKNOWN_TOOL_SECONDS) -> tuple[Call, ...]:
    """All calls of a trajectory; what its tools do after the last one is left out.

    A tool of unrecorded duration takes `unknown_tool_seconds`, no tool takes none. Raises ValueError for a call without
    any context, which an engine refuses.
    """
    unknown = ticks(unknown_tool_seconds)
    made: list[Call] = []
    delay, rewritten, running = 0, False, trajectory.prompt_tokens
    for number, (turn, context) in enumerate(zip(trajectory.turns, trajectory.contexts(), strict=True)):
        rewritten = rewritten or context != running
        if turn.generated_tokens:
            if context == 0:
                raise ValueError(
                    f"trajectory {trajectory.id!r}: turns.{number}: its context has no token, and an engine needs one"
                    " to begin with; give the trajectory a prompt, or leave it out"
                )
            made.append(Call(number, context, turn.generated_tokens, delay, rewritten))
            delay, rewritten = 0, False
        delay += _tool_ticks(turn, unknown)
        running = context + turn.generated_tokens + turn.returned_tokens
    return tuple(made)


def _tool_ticks(turn: Turn, unknown: int) -> int:
    if turn.tool_seconds is not None:
        return ticks(turn.tool_seconds)
    return 0 if turn.tool is None else unknown


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

    def routing_request(self) -> policy.TurnRequest:
        """The turn as it was last placed."""
        trajectory = self.trajectory
        return policy.TurnRequest(
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
