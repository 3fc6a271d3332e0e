"""States of tool returns, and the remaining tokens of finished trajectories after each return."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from libra.trajectory import ToolStatus, Trajectory

PayloadClass = Literal["small", "medium", "large"]

# Payload classes of C-MLFQ as published, in tokens.
SMALL_PAYLOAD = 500
MEDIUM_PAYLOAD = 5_000


class ToolState(NamedTuple):
    """The state of one tool return. It is a tuple, since every lookup hashes the states of all earlier returns."""

    tool: str
    payload: PayloadClass
    status: ToolStatus


def payload_class(returned_tokens: int) -> PayloadClass:
    if returned_tokens <= SMALL_PAYLOAD:
        return "small"
    return "medium" if returned_tokens <= MEDIUM_PAYLOAD else "large"


@lru_cache(maxsize=4096)
def state_of(tool: str, payload: PayloadClass, status: ToolStatus) -> ToolState:
    """The state of a tool return. Equal states are one object, since they are stored and compared often."""
    return ToolState(tool, payload, status)


def remainders(trajectory: Trajectory) -> Iterator[tuple[int, ToolState | None, int]]:
    """Yield the remaining tokens, generated and returned, at the start and after each tool return, as (number of the
    next turn, state of the return, tokens). Raises `ValueError` for an unfinished trajectory, whose remaining tokens
    are unknown.
    """
    require_finished(trajectory)
    remaining = sum(turn.generated_tokens + turn.returned_tokens for turn in trajectory.turns)
    yield 0, None, remaining
    for number, turn in enumerate(trajectory.turns, start=1):
        remaining -= turn.generated_tokens + turn.returned_tokens
        if turn.tool is not None and turn.status is not None:
            yield number, state_of(turn.tool, payload_class(turn.returned_tokens), turn.status), remaining


def require_finished(trajectory: Trajectory) -> None:
    if not trajectory.finished:
        raise ValueError(f"trajectory {trajectory.id!r} is unfinished, so its length is unknown: forget it instead")
