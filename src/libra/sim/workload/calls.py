"""The calls that a trajectory makes to an engine.

Invariant: every turn that generates is one call, in order; a turn that generates nothing calls no engine, but its tool
takes its time and what it returned is in the context of the next call.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.sim.clock import ticks
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
