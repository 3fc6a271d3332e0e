"""Messages to an engine at its boundaries, and its trace of iterations, as values."""

from __future__ import annotations

from dataclasses import dataclass

from libra.sim.engine.request import Request


@dataclass(frozen=True, slots=True)
class Iteration:
    """Record of one iteration, for `trace`. Requests are given by their numbers."""

    engine: int
    start: int  # ticks
    end: int
    scheduled: tuple[tuple[int, int], ...]  # (request, tokens), in the scheduler's order
    preempted: tuple[int, ...]
    cached: tuple[tuple[int, int], ...]  # (request, tokens found) for each admitted request
    free_blocks: int  # after scheduling


@dataclass(frozen=True, slots=True)
class PullEnd:
    """A transfer of KV has ended since the last boundary."""

    request: Request
    failure: str | None  # reason why nothing arrived
    first_token: bool = False  # the first token came with the KV


@dataclass(frozen=True, slots=True)
class Sent:
    """Record that no engine will pull the KV of this request any more."""

    request: Request


Notice = PullEnd | Sent


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of an engine between two iterations, for new weights."""

    ticks: int
    refresh: bool  # contexts are computed again after it, with the new weights
