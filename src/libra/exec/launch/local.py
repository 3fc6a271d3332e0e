"""Start and watch worker processes on this machine.

Invariant: every process started here is gone when `close` returns, and also when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from libra.exec.launch.launcher import ForkError, LaunchError, WorkerLink
from libra.exec.wire.channel import ControllerChannel
from libra.exec.wire.weights import create_buffer

WORKER_ENVIRONMENT = {
    # One thread per worker: a slot is a share of one core, and spinning threads would take the neighbour's.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # Compilation would stall the first request for many seconds and gain nothing on models this small.
    "TORCH_COMPILE_DISABLE": "1",
    # The engine shares our process and our loop; cores are set by the slot.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

_SPAWN_SECONDS = 30.0  # a fork takes milliseconds; a nursery that takes longer hangs
_EXIT_SECONDS = 5.0  # a worker that was told to stop has this long to go by itself
_CLOSE_SECONDS = 5.0  # all workers have this long to go when their nursery is killed: a core dump, a stuck disk
_KILL_SECONDS = 30.0  # a killed process goes as soon as the system lets it


class LocalLauncher:
    """Forks workers from one nursery process (see `nursery.py`)."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, logs: Path, weights: int) -> None:
        self._process = process
        self._control = control
        self._logs = logs
        self._weights = weights
        self._lock = asyncio.Lock()
        self._running: dict[int, int] = {}  # process id -> descriptor: an id may be given to another process later

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, logs: Path) -> AsyncIterator[LocalLauncher]:
        """A launcher that is ready to spawn; closed on the way out."""
        logs.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        weights = create_buffer()
        with open(logs / "nursery.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "libra.exec.launch.nursery", str(theirs.fileno()), str(weights)],
                pass_fds=(theirs.fileno(), weights),
                env={**os.environ, **WORKER_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the controller, which then ends its workers in order
            )
        theirs.close()
        ours.setblocking(False)
        launcher = cls(process, ours, logs, weights)
        try:
            yield launcher
        finally:
            launcher.close()

    @property
    def nursery_pid(self) -> int:
        return self._process.pid

    async def ready(self) -> float:
        """Wait until the nursery has imported everything; returns its seconds."""
        reply = await self._reply()
        if reply is None:
            tail = (self._logs / "nursery.log").read_text(errors="replace").strip().splitlines()[-3:]
            raise LaunchError(
                "worker processes cannot start: " + (" | ".join(tail) or "no output")
                + ". Is the engine extra installed? (pip install 'libra-rl[cpu]')"
            )  # fmt: skip
        return float(reply["ready"])

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        """See `Launcher`."""
        async with self._lock:
            ours, theirs = socket.socketpair()
            order = json.dumps({"name": name, "log": str((self._logs / f"{name}.log").resolve())}).encode()
            socket.send_fds(self._control, [order], [theirs.fileno()])
            theirs.close()
            try:
                reply = await asyncio.wait_for(self._reply(), _SPAWN_SECONDS)
            except TimeoutError:
                raise LaunchError(f"worker {name} cannot start: the nursery process does not answer") from None
            if reply is None:
                raise LaunchError(f"worker {name} cannot start: the nursery process ended")
            if "error" in reply:
                ours.close()
                raise ForkError(f"worker {name} cannot start: {reply['error']}")
            pid = int(reply["pid"])
            with contextlib.suppress(ProcessLookupError):  # it ended already
                self._running[pid] = os.pidfd_open(pid)
            cores = tuple(sorted(os.sched_getaffinity(0)))
            return WorkerLink(name, pid, await ControllerChannel.open(ours), cores, cores[slot % len(cores)])

    def kill(self, link: WorkerLink) -> None:
        """See `Launcher`."""
        if link.pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._running[link.pid], signal.SIGKILL)

    async def gone(self, link: WorkerLink) -> None:
        """See `Launcher`."""
        process = self._running.get(link.pid)
        if process is None:
            return
        if not await _ended(process, _EXIT_SECONDS):
            self.kill(link)
            if not await _ended(process, _KILL_SECONDS):
                raise TimeoutError(f"process {link.pid} does not end")
        os.close(self._running.pop(link.pid))

    def exists(self, link: WorkerLink) -> bool:
        """See `Launcher`."""
        return Path(f"/proc/{link.pid}").exists()

    async def _reply(self) -> dict[str, Any] | None:
        """The nursery's next line; None when it ended."""
        line = await asyncio.get_running_loop().sock_recv(self._control, 4096)
        reply: dict[str, Any] | None = json.loads(line) if line else None
        return reply

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # its workers die with it
            self._process.wait()
        self._control.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._running:
            worker = self._running.popitem()[1]
            select.select([worker], [], [], max(0.0, deadline - time.monotonic()))  # readable when it has ended
            os.close(worker)
        with contextlib.suppress(OSError):
            os.close(self._weights)


async def _ended(process: int, seconds: float) -> bool:
    """Whether the process of this descriptor ends within `seconds`: the descriptor is readable when it has."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), seconds)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(process)
    return True
