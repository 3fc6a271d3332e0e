"""All processes that ever descended from the controllers of a soak, what they held, and what is left of them.

Invariant: a process is known by its id and the moment it started, so that another one that is given the same id later
is not taken for it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

_GONE_SECONDS = 15.0  # a killed process goes as soon as the system lets it
_LISTEN = "0A"  # net/tcp_states.h
_LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The controller at one moment, once all workers have started. `memory` is in bytes."""

    session: int
    time: float  # seconds
    descriptors: int
    threads: int
    memory: int
    fork_server_descriptors: int


class Processes:
    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.everywhere: set[str] = set()  # addresses listened on that are not the loopback interface
        self._seen: dict[tuple[int, float], psutil.Process] = {}
        self._listening: set[str] = set()  # inodes

    @property
    def count(self) -> int:
        return len(self._seen)

    def look(self, controller: int, session: int, ready: bool) -> None:
        """Remember the processes that are there now; no error where one of them ends meanwhile."""
        try:
            root = psutil.Process(controller)
            family = [root, *root.children(recursive=True)]
            for process in family:
                self._seen.setdefault((process.pid, process.create_time()), process)
            if ready and len(family) > 1:  # it has a fork server until it ends
                memory, fork_server = root.memory_info().rss, family[1].num_fds()
                sample = Sample(session, time.monotonic(), root.num_fds(), root.num_threads(), memory, fork_server)
                self.samples.append(sample)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return
        self._look_for_ports(family)

    def left(self) -> list[str]:
        """Processes that are still there although their controller is gone, after waiting for their end."""
        return [f"{process.pid} {process.name()}" for process in still_there(self._seen.values())]

    def listening(self) -> list[str]:
        """Addresses that a process seen here listened on, and that are listened on still."""
        return [address for inode, address in _listeners().items() if inode in self._listening]

    def _look_for_ports(self, family: list[psutil.Process]) -> None:
        listeners = _listeners()
        for process in family:
            for inode in _sockets(process.pid) & set(listeners):
                self._listening.add(inode)
                if listeners[inode].partition(":")[0] not in _LOOPBACK:
                    self.everywhere.add(f"{process.pid} on {listeners[inode]}")


def still_there(processes: Collection[psutil.Process]) -> list[psutil.Process]:
    """Processes that have not ended, after waiting for all. One whose exit status is yet to be read has ended."""
    ends = time.monotonic() + _GONE_SECONDS
    while (alive := list(filter(_is_alive, processes))) and time.monotonic() < ends:
        time.sleep(0.1)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _listeners() -> dict[str, str]:
    """Address by inode of every TCP socket of this machine that listens, as the kernel writes it."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[9]: row[1] for row in rows if row[3] == _LISTEN}


def _sockets(pid: int) -> set[str]:
    """Inodes of its sockets."""
    try:
        targets = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


def shared_memory() -> int:
    """Bytes of shared memory in use on this machine."""
    return int(psutil.virtual_memory().shared)
