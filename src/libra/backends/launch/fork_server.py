"""The fork server process of one node, and the workers that it forked.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra.backends.arithmetic import Bf16Speed
from libra.backends.launch.launcher import ForkError, LaunchError
from libra.backends.transport.shared_memory import create_buffer

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
_COMMAND = ("-m", "libra.backends.launch.fork_server_main")

_SPAWN_SECONDS = 30.0  # a fork takes milliseconds; a fork server that takes longer hangs
_EXIT_SECONDS = 5.0  # a worker that was told to stop has this long to go by itself
_CLOSE_SECONDS = 5.0  # all workers have this long to go when their fork server is killed: a core dump, a stuck disk
_KILL_SECONDS = 30.0  # a killed process goes as soon as the system lets it


class ForkServer:
    """`weights` is the descriptor of the memory in which its workers find weights."""

    def __init__(self, logs: Path, name: str = "fork server", command: tuple[str, ...] = _COMMAND) -> None:
        """Starts it. It writes to `<logs>/<name>.log`, its workers to theirs."""
        self._logs, self.log = logs, logs / f"{name}.log"
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        self.weights = create_buffer()
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command, str(theirs.fileno()), str(self.weights)],
                pass_fds=(theirs.fileno(), self.weights),
                env={**os.environ, **WORKER_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the controller, which then ends its workers in order
            )
        theirs.close()
        self.bf16: Bf16Speed  # of the device here; known when it is ready
        self._lock = asyncio.Lock()
        self._closed = False
        self._running: dict[int, int] = {}  # process id -> descriptor: an id may be given to another process later

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> float:
        """Wait until it has imported everything; returns its seconds. Raises `LaunchError`."""
        reply = await self._reply()
        if reply is None:
            tail = self.log.read_text(errors="replace").strip().splitlines()[-3:]
            raise LaunchError(
                "worker processes cannot start: " + (" | ".join(tail) or "no output")
                + ". Is the engine extra installed? (pip install 'libra-rl[cpu]')"
            )  # fmt: skip
        self.bf16 = Bf16Speed(**reply["bf16"])
        return float(reply["ready"])

    async def fork(self, name: str, connection: socket.socket, environment: Mapping[str, str]) -> int:
        """A worker at the other end of `connection`, which is closed here; returns its process id. Raises `ForkError`,
        and `LaunchError` where no worker can be forked any more."""
        # The answer to a caller that gives up waiting has to be read: the next caller would take it for its own.
        return await asyncio.shield(asyncio.create_task(self._fork(name, connection, environment)))

    async def _fork(self, name: str, connection: socket.socket, environment: Mapping[str, str]) -> int:
        async with self._lock:
            log = str((self._logs / f"{name}.log").resolve())
            order = json.dumps({"name": name, "log": log, "environment": dict(environment)}).encode()
            with connection:
                socket.send_fds(self._control, [order], [connection.fileno()])
            try:
                reply = await asyncio.wait_for(self._reply(), _SPAWN_SECONDS)
            except TimeoutError:
                self._process.kill()  # should it answer yet, nobody would know to whom
                raise LaunchError(f"worker {name} cannot start: the fork server process does not answer") from None
            if reply is None:
                raise LaunchError(f"worker {name} cannot start: the fork server process ended")
            if "error" in reply:
                raise ForkError(f"worker {name} cannot start: {reply['error']}")
            pid = int(reply["pid"])
            with contextlib.suppress(ProcessLookupError):  # it ended already
                self._running[pid] = os.pidfd_open(pid)
            return pid

    def kill(self, pid: int) -> None:
        """End a worker at once; no error where it has ended."""
        if pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._running[pid], signal.SIGKILL)

    async def gone(self, pid: int) -> None:
        """Returns when the worker has ended, which it is made to if it does not go by itself. Raises `TimeoutError`
        when even that does not end it."""
        process = self._running.get(pid)
        if process is None:
            return
        watched = os.dup(process)  # one descriptor has one reader, and another caller may wait as well
        try:
            if not await _ended(watched, _EXIT_SECONDS):
                self.kill(pid)
                if not await _ended(watched, _KILL_SECONDS):
                    raise TimeoutError(f"process {pid} does not end")
        finally:
            os.close(watched)
        if self._running.get(pid) == process:
            os.close(self._running.pop(pid))

    async def ended(self) -> None:
        """Returns when the fork server process itself has ended."""
        process = os.pidfd_open(self.pid)
        try:
            await _ended(process, None)
        finally:
            os.close(process)

    async def _reply(self) -> dict[str, Any] | None:
        """Its next line; None when it ended."""
        line = await asyncio.get_running_loop().sock_recv(self._control, 4096)
        reply: dict[str, Any] | None = json.loads(line) if line else None
        return reply

    def close(self) -> None:
        """A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._process.poll() is None:
            self._process.kill()  # its workers die with it
            self._process.wait()
        self._control.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._running:
            worker = self._running.popitem()[1]
            select.select([worker], [], [], max(0.0, deadline - time.monotonic()))  # readable when it has ended
            os.close(worker)
        os.close(self.weights)


async def _ended(process: int, seconds: float | None) -> bool:
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
