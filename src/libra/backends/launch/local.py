"""Worker processes on this machine: forks of one fork server.

Invariant: every process started here is gone when `close` returns, and also when this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from libra.backends.arithmetic import Bf16Speed
from libra.backends.environment import hardware_name
from libra.backends.launch.fork_server import ForkServer
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.engine_messages import LoadWeights


class LocalLauncher:
    """See `Launcher` for its verbs. All slots are on this machine, and their workers share memory."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._cores = tuple(sorted(os.sched_getaffinity(0)))
        self.hardware = hardware_name()
        self.slots_changed: Callable[[], None] = lambda: None  # they never do

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, logs: Path) -> AsyncIterator[LocalLauncher]:
        """A launcher that is starting; closed on the way out."""
        logs.mkdir(parents=True, exist_ok=True)
        launcher = cls(ForkServer(logs))
        try:
            yield launcher
        finally:
            launcher.close()

    @property
    def bf16(self) -> tuple[Bf16Speed, ...]:
        return (self._fork_server.bf16,)

    def processes(self) -> tuple[int, ...]:
        return (self._fork_server.pid,)

    def offers(self, slot: int) -> bool:
        return True

    async def ready(self) -> float:
        return await self._fork_server.ready()

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        ours, theirs = socket.socketpair()
        try:
            pid = await self._fork_server.fork(name, theirs, {})
        except BaseException:
            ours.close()
            raise
        channel = await ControllerChannel.open(ours)
        return WorkerLink(name, pid, channel, self._cores, self._cores[slot % len(self._cores)])

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
