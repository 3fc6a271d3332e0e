"""Turns from model calls with counted prompts. Several tool calls of a turn become one return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libra.trajectory.logs.format import LogReading
from libra.trajectory.record import ToolStatus, Turn

_WORST: tuple[ToolStatus, ...] = ("timeout", "error", "unknown", "ok")


@dataclass(frozen=True, slots=True)
class LoggedReturn:
    """Return of one tool. `seconds` is None if it was not recorded."""

    tool: str = "tool"
    status: ToolStatus = "unknown"
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call: tokens of its prompt and its answer, and the tool return before the next call; None if unknown."""

    prompt_tokens: int
    generated_tokens: int
    back: LoggedReturn | None = None


def as_one(returns: Sequence[LoggedReturn], reading: LogReading) -> LoggedReturn:
    """One return for all tool calls of a turn: the first name, the worst outcome, the sum of seconds."""
    if len(returns) > 1:
        reading.remarks["turns with several tool calls, recorded under the first name"] += 1
    known = [it.seconds for it in returns if it.seconds is not None]
    return LoggedReturn(
        tool=returns[0].tool,
        status=worst(it.status for it in returns),
        seconds=sum(known) if len(known) == len(returns) else None,
    )


def worst(statuses: Iterable[ToolStatus]) -> ToolStatus:
    found = set(statuses)
    return next(status for status in _WORST if status in found)


def turns_of_calls(calls: Sequence[ModelCall]) -> tuple[Turn, ...]:
    """The turns of one episode.

    Returned tokens are the next prompt minus this prompt and its answer. If the next prompt is shorter, as after a
    compaction, the next turn has its own context. The last turn calls no tool unless its call has a return."""
    turns: list[Turn] = []
    running = calls[0].prompt_tokens if calls else 0
    for number, call in enumerate(calls):
        context = None if call.prompt_tokens == running else call.prompt_tokens
        running = call.prompt_tokens + call.generated_tokens
        last = number + 1 == len(calls)
        if last and call.back is None:
            turns.append(Turn(call.generated_tokens, None, None, 0, None, context))
            break
        returned = 0 if last else max(0, calls[number + 1].prompt_tokens - running)
        running += returned
        back = call.back or LoggedReturn()
        turns.append(Turn(call.generated_tokens, back.tool, back.status, returned, back.seconds, context))
    return tuple(turns)
