"""One fork server for the tests of a file: importing vLLM takes longer than most of them.

Invariant: every test finds it as if it had just been started: without workers, and with nothing in their memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from libra.backends.launch.fork_server import ForkServer
from libra.backends.launch.launcher import LocalLauncher


class SharedForkServer:
    def __init__(self, process: ForkServer) -> None:
        self._process = process

    @asynccontextmanager
    async def open(self) -> AsyncIterator[LocalLauncher]:
        """A launcher for one test."""
        try:
            yield LocalLauncher(self._process)
        finally:
            workers = psutil.Process(self._process.pid).children(recursive=True)
            for worker in workers:
                worker.kill()
            _, left = psutil.wait_procs(workers, timeout=10)
            assert not left
            os.ftruncate(self._process.weights, 0)


@contextmanager
def shared_fork_server(logs: Path) -> Iterator[SharedForkServer]:
    process = ForkServer(logs)
    try:
        asyncio.run(process.ready())
        yield SharedForkServer(process)
    finally:
        process.close()
