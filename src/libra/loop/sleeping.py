"""Engines that sleep while their slot trains: the process keeps compiled code and graphs, and frees its memory.

Invariant: a worker has at most one sleeping engine. A sleeping engine has no weights and no KV; after waking, it loads
the current weights before it serves. The death of a sleeping engine does not count as a loss of the worker.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from libra.backends.launch.launcher import WorkerLauncher
from libra.backends.transport.engine_messages import Sleep, Wake
from libra.backends.transport.messages import Acknowledged
from libra.backends.vllm.engine_handle import EngineHandle
from libra.exec.protocols import WorkerFailedError, WorkerLostError


@dataclass(frozen=True, slots=True)
class _Asleep:
    shape: str
    handle: EngineHandle


class SleepingEngines:
    """Sleeping engines by worker; `launcher` started them."""

    def __init__(self, launcher: WorkerLauncher) -> None:
        self._launcher = launcher
        self._engines: dict[str, _Asleep] = {}

    def has(self, handle: EngineHandle) -> bool:
        return any(entry.handle is handle for entry in self._engines.values())

    async def lay(self, handle: EngineHandle, shape: str) -> None:
        """Put an engine without turns to sleep, and kill it if it cannot sleep. vLLM refuses to sleep if the GPU's used
        memory grows meanwhile, even by other processes.
        """
        self._engines[handle.name] = _Asleep(shape, handle)
        try:
            await handle.ask(Sleep(), Acknowledged)
        except (WorkerLostError, WorkerFailedError, TimeoutError) as error:
            handle.declare_lost(str(error))
            self._launcher.kill(handle.link)
            await self._launcher.gone(handle.link)
            del self._engines[handle.name]

    async def of(self, worker: str, shape: str) -> EngineHandle | None:
        """The worker's sleeping engine of this shape, or None. Ends a sleeping engine of another shape."""
        entry = self._engines.get(worker)
        if entry is None:
            return None
        if entry.shape == shape and not entry.handle.lost:
            return entry.handle
        del self._engines[worker]
        await entry.handle.stop()
        await self._launcher.gone(entry.handle.link)
        return None

    async def wake(self, handle: EngineHandle) -> bool:
        """Wake an engine: it allocates its memory again, without contents. Returns False if this failed; the engine is
        then lost.
        """
        handle.version = -1
        try:
            await handle.ask(Wake(), Acknowledged)
        except (WorkerLostError, WorkerFailedError, TimeoutError) as error:
            handle.declare_lost(str(error))
            return False
        finally:
            del self._engines[handle.name]
        return True

    async def stop(self) -> None:
        """End all sleeping engines in order."""
        await asyncio.gather(*(entry.handle.stop() for entry in self._engines.values()))
