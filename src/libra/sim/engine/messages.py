"""What an engine is told at its boundaries, and what it tells of its iterations, as values."""

from __future__ import annotations

from dataclasses import dataclass

from libra.sim.engine.request import Request


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration did, for `trace`. Requests are told by their numbers."""

    engine: int
    start: int  # ticks
    end: int
    scheduled: tuple[tuple[int, int], ...]  # (request, tokens), in the scheduler's order
    preempted: tuple[int, ...]
    cached: tuple[tuple[int, int], ...]  # (request, tokens found), of those admitted
    free_blocks: int  # after scheduling


@dataclass(frozen=True, slots=True)
class PullEnd:
    """A transfer of KV has ended since the last boundary."""

    request: Request
    failure: str | None  # why nothing came
    first_token: bool = False  # came with it


@dataclass(frozen=True, slots=True)
class Sent:
    """Nobody will pull the KV of this request any more."""

    request: Request


Notice = PullEnd | Sent


@dataclass(frozen=True, slots=True)
class Pause:
    """An engine stops between two iterations, for new weights."""

    ticks: int
    refresh: bool  # contexts are computed again, with the new weights
