"""All processes that ever descended from the controllers of a soak, what they held, and what is left of them.

Invariant: a process is known by its id and the moment it started, so that another one that is given the same id later
is not taken for it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

_GONE_SECONDS = 15.0  # a killed process goes as soon as the system lets it


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
        self._listening: set[tuple[str, int]] = set()

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
        return [f"{ip}:{port}" for _, ip, port in _listeners() if (ip, port) in self._listening]

    def _look_for_ports(self, family: list[psutil.Process]) -> None:
        ours = {process.pid for process in family}
        for pid, ip, port in _listeners():
            if pid in ours:
                self._listening.add((ip, port))
                if not ip_address(ip).is_loopback:
                    self.everywhere.add(f"{pid} on {ip}:{port}")


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


def _listeners() -> list[tuple[int | None, str, int]]:
    """Process and address of every TCP socket of this machine that listens."""
    found = psutil.net_connections("tcp")
    return [(it.pid, it.laddr.ip, it.laddr.port) for it in found if it.laddr and it.status == psutil.CONN_LISTEN]


def shared_memory() -> int:
    """Bytes of shared memory in use on this machine."""
    return int(psutil.virtual_memory().shared)
