"""The executor's interfaces: to the controller of worker processes, and to the observer of its moves.

Invariant: only the backend handles processes, stored weights and the transport of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from libra.exec.pool import Worker
from libra.plan.allocation import Allocation
from libra.plan.transition import Duty, Move, Transition


class WorkerLostError(ConnectionError):
    """The worker process is gone (killed, crashed, or its machine with it)."""


class WorkerFailedError(RuntimeError):
    """The worker is alive and reports that an order failed."""


class UnsupportedTransitionError(ValueError):
    """A backend does not support a part of a plan."""


Outcome = Literal["done", "undone", "failed"]  # of a move


class ProcessController(Protocol):
    """Starts, frees and ends workers. `free` and `start` raise `WorkerLostError`, `WorkerFailedError` or `TimeoutError`
    when they fail; the caller then calls `end`.
    """

    @property
    def step_allowance(self) -> float:
        """Estimated seconds within which a training step is made, or the loss of a replica is noticed; 0 before the
        first replica has started."""
        ...

    def require_core(self) -> None:
        """Raises `CoreLostError` when training has begun and no core replica is present."""
        ...

    def unsupported(self, transition: Transition) -> str | None:
        """Name, in one line, the part of the plan that this backend does not support; None if it supports all."""
        ...

    def offers(self, slot: int) -> bool:
        """Whether the slot is available: its node is not lost."""
        ...

    async def free(self, worker: str, duty: Duty, then: Duty) -> None:
        """Let a worker finish its work, and end its process. The backend may instead keep the process asleep, to use it
        again after the worker's next duty, `then`.
        """
        ...

    async def start(self, worker: str, duty: Duty) -> None:
        """Start a process, which is in service when this returns. An earlier process of the slot ends completely
        before.
        """
        ...

    def end(self, worker: str, why: str) -> None:
        """End all processes of the worker at once; calls that wait for it fail."""
        ...

    def route(self, allocation: Allocation) -> None:
        """Send turns to engines by these buckets, from now on."""
        ...

    def declare_dead(self) -> None:
        """Find processes that ended without closing a channel."""
        ...

    async def stop(self) -> None:
        """End all workers in order."""
        ...


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """An ended move. `undone`: the worker has its earlier duty again; `failed`: the worker is idle."""

    move: Move
    seconds: float
    outcome: Outcome
    why: str = ""  # the reason why the move is not done


@dataclass(frozen=True, slots=True)
class Applied:
    """Outcome of a transition: the ended moves, and the reason why later moves were dropped; None: no move was
    dropped.
    """

    moves: tuple[MoveOutcome, ...]
    failure: str | None


class PoolObserver(Protocol):
    """Receives the changes of the pool."""

    def role(self, worker: Worker) -> None: ...
    def moved(self, moved: MoveOutcome) -> None: ...

    def lost(self, worker: str, why: str, retired: bool) -> None:
        """A worker with a duty is lost. `retired`: its slot is out of use."""
        ...

    def node_back(self, worker: str) -> None:
        """The slot of a worker that was lost with its node can be used again."""
        ...
