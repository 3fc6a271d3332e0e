"""The executor's interfaces: to the controller of worker processes, and to the observer of its moves.

Invariant: processes, the storage of weights and the transport of bytes are left to the backend.
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
    """The worker is alive and reports that it could not carry out an order."""


class UnsupportedTransitionError(ValueError):
    """A backend cannot carry out a part of a plan."""


Outcome = Literal["done", "undone", "failed"]  # of a move


class ProcessController(Protocol):
    """Starts, frees and ends workers. `free` and `start` raise `WorkerLostError`, `WorkerFailedError` or `TimeoutError`
    when they fail; `end` then ends the rest of the worker."""

    @property
    def step_allowance(self) -> float:
        """Estimated seconds within which a training step is made, or the loss of a replica is noticed; 0 before the
        first replica has started."""
        ...

    def require_core(self) -> None:
        """Raises `CoreLostError` when training has begun and no core replica is present."""
        ...

    def unsupported(self, transition: Transition) -> str | None:
        """The part of the transition's plan that this backend cannot carry out, in one line; None if there is none."""
        ...

    def offers(self, slot: int) -> bool:
        """Whether the slot is available: its node is not lost."""
        ...

    async def free(self, worker: str, duty: Duty, then: Duty) -> None:
        """Let a worker finish its work, and end its process. It may stay, out of the way, where it is of use after the
        worker has done `then`."""
        ...

    async def start(self, worker: str, duty: Duty) -> None:
        """Start a process, in service when this returns. All of an earlier one is gone before it starts."""
        ...

    def end(self, worker: str, why: str) -> None:
        """End all processes of the worker at once; calls that wait for it fail."""
        ...

    def route(self, allocation: Allocation) -> None:
        """Send turns to engines by these buckets from now on."""
        ...

    def declare_dead(self) -> None:
        """Find processes that ended without a sign on a channel."""
        ...

    async def stop(self) -> None:
        """End all in order."""
        ...


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """One move that ended. `undone`: the worker has its earlier duty again; `failed`: it does nothing."""

    move: Move
    seconds: float
    outcome: Outcome
    why: str = ""  # it was not done


@dataclass(frozen=True, slots=True)
class Applied:
    """Outcome of a transition: the moves made, and the reason why the rest was dropped; None: nothing was dropped."""

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
