"""What an executor needs of whoever runs engines and trainers, and what it tells of its moves.

Invariant: nothing here says how: what a process is, where weights lie and how bytes travel is the backend's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from libra.exec.pool import Worker
from libra.plan.allocation import Allocation
from libra.plan.transition import Duty, Move, Transition


class WorkerLostError(ConnectionError):
    """The worker process is gone (killed, crashed, or its machine with it)."""


class WorkerFailedError(RuntimeError):
    """The worker is alive and says that it could not do what it was told."""


class UnsupportedTransitionError(ValueError):
    """A backend cannot carry out a part of a plan."""


LinkT = TypeVar("LinkT")  # what a backend knows a started worker process by
LinkIn = TypeVar("LinkIn", contravariant=True)
Outcome = Literal["done", "undone", "failed"]  # of a move


class Launcher(Protocol[LinkT]):
    """Starts and ends worker processes. Slots are numbered from 0; each is a place for one process at a time."""

    slots_changed: Callable[[], None]  # told when `offers` may say something else

    @property
    def hardware(self) -> str:
        """What workers run on; equal where costs that were measured are equal."""
        ...

    def processes(self) -> Sequence[int]:
        """Process ids under which workers of this machine run."""
        ...

    def offers(self, slot: int) -> bool:
        """Whether the slot is there: its node is not lost."""
        ...

    async def ready(self) -> float:
        """Wait until workers can be started; returns the seconds that their libraries took to import. Raises
        `LaunchError`."""
        ...

    async def spawn(self, name: str, slot: int) -> LinkT:
        """Start one worker. Its output goes to `<logs>/<name>.log`. Raises `ForkError`, and `LaunchError` where no
        worker can be started any more."""
        ...

    def kill(self, link: LinkT) -> None:
        """End a worker that was spawned here, at once; no error where it has ended."""
        ...

    async def gone(self, link: LinkT) -> None:
        """Returns when the worker's process has ended, which it is made to if it does not go by itself. Raises
        `TimeoutError` when even that does not end it."""
        ...

    def exists(self, link: LinkT) -> bool:
        """Whether the worker's process is there, as far as is known."""
        ...


class WeightStore(Protocol[LinkIn]):
    """Where published weights lie for engines to read."""

    async def bring(self, weights: Any, size: int, source: LinkIn, target: LinkIn) -> None:
        """The node of `target` holds these weights, of `size` bytes, when this returns; the node of `source` has them.
        Raises `SourceLostError`, and `CopyError` where they did not arrive whole."""
        ...


class Engine(Protocol):
    """A rollout engine in its worker process. Verbs raise `WorkerLostError` when it goes away."""

    @property
    def name(self) -> str: ...

    async def drained(self, deadline: float) -> bool:
        """Wait until no turn is running; False when the deadline, in seconds, came first."""
        ...

    async def vacate(self, deadline: float) -> None:
        """Stop all turns where they are, to go on elsewhere, and wait until what they want of their KV is put down,
        `deadline` seconds at most."""
        ...

    async def stop(self) -> None:
        """End it; one that is already gone is stopped."""
        ...


class Trainer(Protocol):
    """The training side as one unit: replicas that share each step."""

    @property
    def step_allowance(self) -> float:
        """Seconds in which a step is made, or somebody found who is lost in it, as far as one can tell."""
        ...

    def require_core(self) -> None:
        """Raises `CoreLostError` when no core replica is there."""
        ...


class ProcessController(Protocol):
    """Starts, frees and ends what workers do. The verbs that take time raise `WorkerLostError`, `WorkerFailedError` or
    `TimeoutError` when they fail; what they left of the worker is then ended with `end`."""

    @property
    def trainer(self) -> Trainer | None:
        """None before the first replica has started."""
        ...

    def unsupported(self, transition: Transition) -> str | None:
        """What of the transition's plan cannot be carried out here, in one line; None where all can."""
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
        """End whatever there is of the worker, at once; all that waits for it fails."""
        ...

    def route(self, allocation: Allocation) -> None:
        """Send turns to engines by these buckets from now on."""
        ...

    def declare_dead(self) -> None:
        """Notice what a channel does not tell: a process that is gone."""
        ...

    async def stop(self) -> None:
        """End all in order."""
        ...


@dataclass(frozen=True, slots=True)
class MoveOutcome:
    """One move that ended. `undone`: the worker does again what it did before; `failed`: it does nothing."""

    move: Move
    seconds: float
    outcome: Outcome
    why: str = ""  # it was not done


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a transition: the moves that were made, and why the rest was dropped; None: nothing was."""

    moves: tuple[MoveOutcome, ...]
    failure: str | None


class PoolObserver(Protocol):
    """Who is told of changes of the pool."""

    def role(self, worker: Worker) -> None: ...
    def moved(self, moved: MoveOutcome) -> None: ...

    def lost(self, worker: str, why: str, retired: bool) -> None:
        """A worker that did something went away. `retired`: its slot is not used any more."""
        ...

    def node_back(self, worker: str) -> None:
        """Its slot, which was lost with its node, can be used again."""
        ...
