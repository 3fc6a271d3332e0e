"""The executor's interfaces: to the controller of worker processes, and to the observer of its moves.

Invariant: nothing here says how: what a process is, where weights lie and how bytes travel is the backend's business.
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
    """The worker is alive and reports that it could not do what was asked."""


class UnsupportedTransitionError(ValueError):
    """A backend cannot carry out a part of a plan."""


Outcome = Literal["done", "undone", "failed"]  # of a move


class ProcessController(Protocol):
    """Starts, frees and ends workers. `free` and `start` raise `WorkerLostError`, `WorkerFailedError` or `TimeoutError`
    when they fail; `end` then ends what is left of the worker."""

    @property
    def step_allowance(self) -> float:
        """Estimated seconds within which a training step is made, or a replica is found to be lost in it; 0 before the
        first replica has started."""
        ...

    def require_core(self) -> None:
        """Raises `CoreLostError` when training has begun and no core replica is there."""
        ...

    def unsupported(self, transition: Transition) -> str | None:
        """The part of the transition's plan that this backend cannot carry out, in one line; None where it can all."""
        ...

    def offers(self, slot: int) -> bool:
        """Whether the slot is there: its node is not lost."""
        ...

    async def free(self, worker: str, duty: Duty) -> None:
        """Let a worker finish what it does, and end its process."""
        ...

    async def start(self, worker: str, duty: Duty) -> None:
        """Start a process, in service when this returns. What is left of an earlier one is gone before it starts."""
        ...

    def end(self, worker: str, why: str) -> None:
        """End all that there is of the worker, at once; calls that wait for it fail."""
        ...

    def route(self, allocation: Allocation) -> None:
        """Send turns to engines by these buckets from now on."""
        ...

    def declare_dead(self) -> None:
        """Find processes that are gone without notice on a channel."""
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
    """Outcome of a transition: the moves that were made, and why the rest was dropped; None: nothing was dropped."""

    moves: tuple[MoveOutcome, ...]
    failure: str | None


class PoolObserver(Protocol):
    """Receives the changes of the pool."""

    def role(self, worker: Worker) -> None: ...
    def moved(self, moved: MoveOutcome) -> None: ...

    def lost(self, worker: str, why: str, retired: bool) -> None:
        """A worker with a duty is lost. `retired`: its slot is not used any more."""
        ...

    def node_back(self, worker: str) -> None:
        """The slot of a worker, which was lost with its node, can be used again."""
        ...
