"""Launchers of worker processes: their interface, and the launcher for this machine.

Invariant: a link identifies a worker, since a process id is valid on one machine only. Every process that a launcher
started has ended when the launcher is closed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from libra.backends.devices import CPU, SlotDevice, hardware_name
from libra.backends.launch.fork_server import ForkServer
from libra.backends.machine import Bf16Speed
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.engine_messages import Lent, LoadWeights
from libra.backends.transport.messages import Tensor
from libra.exec.protocols import WorkerFailedError

if TYPE_CHECKING:
    from libra.backends.launch.handle import Handle

LOCAL = "local"  # the node of a run on a single node


@dataclass(frozen=True, slots=True)
class WorkerLink:
    """A started worker process: the channel to it, and its node."""

    name: str
    pid: int  # on its node
    channel: ControllerChannel
    cores: tuple[int, ...]  # all cores of its node that it may use
    core: int  # of its slot
    node: str = LOCAL  # equal for workers that share memory
    host: str = "127.0.0.1"  # address at which workers of other nodes reach it
    device: SlotDevice = CPU  # of its slot

    @property
    def own_cores(self) -> tuple[int, ...]:
        """Cores on which the worker computes: the core of its slot, or all cores if the worker has a GPU."""
        return (self.core,) if self.device == CPU else self.cores


class CopyError(RuntimeError):
    """Weights did not arrive at a node whole and in time."""


class SourceLostError(CopyError):
    """The source node does not have the weights, or no longer has them."""


class WeightStore(Protocol):
    """Keeps published weights in memory that engines read."""

    async def bring(self, weights: LoadWeights, size: int, source: WorkerLink, target: WorkerLink) -> None:
        """Copy weights of `size` bytes from the node of `source` to the node of `target`, if they are not there yet.
        Raises `SourceLostError`, and `CopyError` if they did not arrive whole."""
        ...


class WorkerLauncher(WeightStore, Protocol):
    """Starts and ends worker processes, and keeps published weights in the shared memory of their nodes. Slots are
    numbered from 0; each has room for one process at a time."""

    slots_changed: Callable[[], None]  # called when the answers of `offers` may have changed

    @property
    def hardware(self) -> str:
        """Description of the hardware that workers run on; equal descriptions mean equal costs."""
        ...

    def processes(self) -> Sequence[int]:
        """Ids of the worker processes on this machine."""
        ...

    def offers(self, slot: int) -> bool:
        """Whether the slot is available, which means that its node is not lost."""
        ...

    async def ready(self) -> float:
        """Wait until workers can be started; returns the seconds for which their libraries were imported. Raises
        `LaunchError`."""
        ...

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        """Start one worker. Its output goes to `<logs>/<name>.log`. Raises `ForkError`, and `LaunchError` if no worker
        can be started any more."""
        ...

    def kill(self, link: WorkerLink) -> None:
        """Kill a worker of this launcher at once; no error if it has ended."""
        ...

    async def gone(self, link: WorkerLink) -> None:
        """Wait until the worker's process has ended; kill it if it does not end by itself. Raises `TimeoutError` if
        even that does not end it."""
        ...

    def exists(self, link: WorkerLink) -> bool:
        """Whether the worker's process is believed to exist."""
        ...

    @property
    def bf16(self) -> Sequence[Bf16Speed]:
        """Speed of bf16 products on each node, at least one; known once workers can be started."""
        ...


class LenderRefusedError(WorkerFailedError):
    """An agent's engine does not fit this run, and never will. The message has one line."""


@dataclass(frozen=True, slots=True)
class RunWeights:
    """The weights that a run publishes, and their layout."""

    layout: tuple[Tensor, ...]
    size: int  # bytes of one buffer
    latest: LoadWeights


class AgentLauncher(WorkerLauncher, Protocol):
    """A launcher that also has slots on servers, lent by agents."""

    async def look(self) -> None:
        """Query all agents, and from now on query unavailable ones again and again. Raises `LenderRefusedError`."""
        ...

    async def join(self, engine: Handle) -> Lent:
        """Borrow an agent's engine for the worker `engine`, spawned for it. Raises `LenderRefusedError`,
        `WorkerLostError`, `WorkerFailedError` or `TimeoutError`."""
        ...

    def begin(self, published: RunWeights) -> None:
        """Announce the run's first weights and their layout."""
        ...

    def publish(self, order: LoadWeights) -> None:
        """Announce newer weights, which the agents then load."""
        ...


class LocalLauncher:
    """A `WorkerLauncher` on this machine. Workers of all slots share memory."""

    def __init__(self, fork_server: ForkServer, devices: Sequence[SlotDevice] = (), places: Sequence[int] = ()) -> None:
        """`devices` are the devices of the slots. If empty, all slots are CPU slots; `places` are their numbers among
        the cores, by default the numbers of the slots."""
        self._fork_server, self._devices, self._places = fork_server, devices, places
        self._cores = tuple(sorted(os.sched_getaffinity(0)))
        self.hardware = hardware_name(bool(devices))
        self.slots_changed: Callable[[], None] = lambda: None  # never called

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, logs: Path, devices: Sequence[SlotDevice] = (), places: Sequence[int] = ()
    ) -> AsyncIterator[LocalLauncher]:
        """Context with a launcher that is starting; closes it at the end."""
        logs.mkdir(parents=True, exist_ok=True)
        launcher = cls(ForkServer(logs, kind="cuda" if devices else "cpu"), devices, places)
        try:
            yield launcher
        finally:
            launcher.close()

    @property
    def bf16(self) -> tuple[Bf16Speed, ...]:
        return (self._fork_server.bf16,)

    @property
    def weights(self) -> int:
        """Descriptor of the memory in which its workers find weights."""
        return self._fork_server.weights

    def processes(self) -> tuple[int, ...]:
        return (self._fork_server.pid,)

    def offers(self, slot: int) -> bool:
        return True

    async def ready(self) -> float:
        return await self._fork_server.ready()

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        device = self._devices[slot] if self._devices else CPU
        ours, theirs = socket.socketpair()
        try:
            pid = await self._fork_server.fork(name, theirs, device.environment)
        except BaseException:
            ours.close()
            raise
        channel = await ControllerChannel.open(ours)
        core = self._cores[(self._places[slot] if self._places else slot) % len(self._cores)]
        return WorkerLink(name, pid, channel, self._cores, core, device=device)

    def kill(self, link: WorkerLink) -> None:
        self._fork_server.kill(link.pid)

    async def gone(self, link: WorkerLink) -> None:
        await self._fork_server.gone(link.pid)

    def exists(self, link: WorkerLink) -> bool:
        return Path(f"/proc/{link.pid}").exists()

    async def bring(self, weights: LoadWeights, size: int, source: WorkerLink, target: WorkerLink) -> None:
        pass  # they share the memory

    def close(self) -> None:
        self._fork_server.close()
