"""What a run needs of the launcher that starts its worker processes.

Invariant: a worker is known by its link, since a process id means something on one machine only. Every process that a
launcher started is gone when it is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from libra.backends.arithmetic import Bf16Speed
from libra.backends.transport.channel import ControllerChannel
from libra.exec import protocols


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


class WorkerLauncher(protocols.Launcher[WorkerLink], protocols.WeightStore[WorkerLink], Protocol):
    """Worker processes, and the shared memory of their nodes in which published weights lie."""

    @property
    def bf16(self) -> Sequence[Bf16Speed]:
        """How each node does bf16 products, one at least; known when workers can be started."""
        ...
