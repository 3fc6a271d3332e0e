"""What the rest of a run needs of whoever starts its worker processes.

Invariant: a worker is known by its link, since a process id means something on one machine only. Every process that a
launcher started is gone when it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from libra.backends.arithmetic import Bf16Speed
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.messages import LoadWeights


class LaunchError(RuntimeError):
    """Worker processes cannot be started."""


class ForkError(RuntimeError):
    """This one worker process cannot be started now; others go on."""


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """A started worker process, the channel to it, and where it runs."""

    name: str
    pid: int  # on its node
    channel: ControllerChannel
    cores: tuple[int, ...]  # all of its node that it may use
    core: int  # of its slot
    node: str = "local"  # equal for workers that share memory
    host: str = "127.0.0.1"  # where workers of other nodes reach it


class CopyError(RuntimeError):
    """Weights did not reach a node whole and in time."""


class SourceLostError(CopyError):
    """The node where the weights should be does not have them, or not any more."""


class Launcher(Protocol):
    """Starts and ends worker processes. Slots are numbered from 0; each is a place for one process at a time."""

    slots_changed: Callable[[], None]  # told when `offers` may say something else

    @property
    def hardware(self) -> str:
        """What workers run on; equal where costs that were measured are equal."""
        ...

    @property
    def bf16(self) -> Sequence[Bf16Speed]:
        """How each node does bf16 products, one at least; known when workers can be started."""
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

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        """Start one worker. Its output goes to `<logs>/<name>.log`. Raises `ForkError`, and `LaunchError` where no
        worker can be started any more."""
        ...

    def kill(self, link: WorkerLink) -> None:
        """End a worker that was spawned here, at once; no error where it has ended."""
        ...

    async def gone(self, link: WorkerLink) -> None:
        """Returns when the worker's process has ended, which it is made to if it does not go by itself. Raises
        `TimeoutError` when even that does not end it."""
        ...

    async def bring(self, weights: LoadWeights, size: int, source: WorkerLink, target: WorkerLink) -> None:
        """The node of `target` holds these weights, of `size` bytes, when this returns; the node of `source` has them.
        Raises `SourceLostError`, and `CopyError` where they did not arrive whole."""
        ...

    def exists(self, link: WorkerLink) -> bool:
        """Whether the worker's process is there, as far as is known."""
        ...


def raise_in_loop(task: asyncio.Task[None]) -> None:
    """As the callback of a task that is done: what broke it must not be forgotten, and goes to the loop's exception
    handler."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
