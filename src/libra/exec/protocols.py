"""The executor's interfaces: the controller of worker processes, and the observer of its moves.

Invariant: only the backend handles processes, stored weights and the transport of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from libra.exec.pool import Worker
from libra.plan.allocation import Allocation
from libra.plan.transition import Duty, Move, Transition


class WorkerLostError(ConnectionError):
    """The worker process is lost: it was killed, it crashed, or its machine did."""


class WorkerFailedError(RuntimeError):
    """The worker is alive, and reports that an order failed."""


class UnsupportedTransitionError(ValueError):
    """A backend does not support a part of a plan."""


Outcome = Literal["done", "undone", "failed"]  # of a move


class ProcessController(Protocol):
    """Starts, frees and ends workers. `free` and `start` raise `WorkerLostError`, `WorkerFailedError` or `TimeoutError`
    if they fail; the caller then calls `end`.
    """

    @property
    def step_allowance(self) -> float:
        """Estimated seconds within which a training step ends, or the loss of a replica is noticed; 0 before the first
        replica has started."""
        ...

    def require_core(self) -> None:
        """Raise `CoreLostError` if training has begun and no core replica is present."""
        ...

    def unsupported(self, transition: Transition) -> str | None:
        """The part of the plan that this backend does not support, in one line; None if it supports the plan."""
        ...

    def offers(self, slot: int) -> bool:
        """Whether the slot is available, which means that its node is not lost."""
        ...

    async def free(self, worker: str, duty: Duty, then: Duty) -> None:
        """Have a worker finish its work, and end its process. The backend may instead keep the process asleep, to use
        it again after the worker's next duty, `then`.
        """
        ...

    async def start(self, worker: str, duty: Duty) -> None:
        """Start a process, which is in service when this returns. Waits first until an earlier process of the slot has
        ended completely.
        """
        ...

    def end(self, worker: str, why: str) -> None:
        """End all processes of the worker at once. Calls that wait for them fail."""
        ...

    def route(self, allocation: Allocation) -> None:
        """Route turns by the buckets of `allocation` from now on."""
        ...

    def declare_dead(self) -> None:
        """Declare workers lost whose processes ended without closing a channel."""
        ...

    async def stop(self) -> None:
        """End all workers in order."""
        ...


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """An ended move. `undone`: the worker has its earlier duty again. `failed`: the worker is idle."""

    move: Move
    seconds: float
    outcome: Outcome
    why: str = ""  # reason why the move is not done


@dataclass(frozen=True, slots=True)
class Applied:
    """Outcome of a transition: the ended moves, and the reason why later moves were dropped; None if none were."""

    moves: tuple[MoveOutcome, ...]
    failure: str | None


class PoolObserver(Protocol):
    """Observer of the changes of the pool."""

    def role(self, worker: Worker) -> None: ...
    def moved(self, moved: MoveOutcome) -> None: ...

    def lost(self, worker: str, why: str, retired: bool) -> None:
        """Called when a worker with a duty is lost. If `retired`, its slot is out of use."""
        ...

    def node_back(self, worker: str) -> None:
        """Called when the slot of a worker that was lost with its node can be used again."""
        ...
