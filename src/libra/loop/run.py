"""`libra run`: start all workers, warm up, measure, post-train, evaluate, and end all workers.

Invariant: after any end of a run (last step, error, Ctrl-C), its workers have ended and its files are readable.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from libra.backends.devices import slot_devices
from libra.backends.launch.launcher import LocalLauncher, WorkerLauncher
from libra.backends.machine import choose
from libra.config.run import ClusterConfig, ConfigError, RunConfig
from libra.environments.protocol import Environment
from libra.environments.served import ServedEnvironment
from libra.loop.checkpoint import read_interrupted
from libra.loop.episode_server import EpisodeServer
from libra.loop.metrics import MetricsEndpoint
from libra.loop.progress import RunProgress
from libra.loop.run_directory import record_config
from libra.loop.session import Session
from libra.loop.warmup import warm_model
from libra.records.files import DiskError
from libra.records.schema import RunSummary
from libra.report.live import Display

_MEMORY_SECONDS = 20.0  # between two measurements, each with tens of milliseconds of CPU time per large process


async def run(
    config: RunConfig,
    environment: Environment | ServedEnvironment,
    display: Display,
    resume: bool,
    planned: str = "",
) -> RunSummary:
    """Make a whole run in the existing `config.run_directory`; with `resume`, the remaining steps of a run. `planned`
    describes the plan that the run carries out. Writes and returns the summary. Raises `ConfigError` if the run has
    already made more steps than `training.steps`.
    """
    directory = config.run_directory
    began = time.monotonic()
    before = read_interrupted(directory) if resume else None
    if before is not None and before.history.version > config.training.steps:
        raise ConfigError(
            f"training.steps: {config.training.steps}, but {directory} has already made {before.history.version} steps;"
            " resume with at least that many"
        )
    async with (
        MetricsEndpoint.open(config.metrics) as metrics,
        _launcher(config.cluster, directory / "logs") as launcher,
        MemoryWatch(launcher.processes) as memory,
        _playing(environment, directory / "logs") as server,
    ):
        progress = RunProgress(config.name, config.training.steps, display)
        if metrics.address is not None:
            progress.line(f"metrics for Prometheus: {metrics.address}")
        progress.phase("starting: importing torch and vLLM")
        imported = await launcher.ready()
        progress.line(f"worker libraries imported in {imported:.1f} s")
        choice = choose(config.training.precision, launcher.bf16)
        progress.line(choice.words)
        config = config.computing_in(choice.precision)
        record_config(config)
        model = await warm_model(config, environment, launcher, choice.precision, progress.warm_up)
        session = Session(
            config, environment, server, progress, launcher, metrics, memory.peak, choice, model, began, before, planned
        )
        # An error raised in a callback has no caller: it ends the run instead of being logged and forgotten.
        main = asyncio.create_task(session.run())
        broken: list[BaseException] = []

        def stop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if "socket" in context:
                return  # too many files are open to accept a connection; asyncio tries again
            broken.append(context.get("exception") or RuntimeError(context["message"]))
            main.cancel()

        asyncio.get_running_loop().set_exception_handler(stop)
        try:
            summary = await main
            session.files.close()
            return summary
        except asyncio.CancelledError:
            if broken:
                raise broken[0] from None
            raise
        finally:
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)
            with suppress(DiskError):  # either this ends the run already, or a worse error does
                session.files.close()


@asynccontextmanager
async def _playing(environment: Environment | ServedEnvironment, logs: Path) -> AsyncIterator[EpisodeServer | None]:
    """The server for an environment that plays its own episodes; None for other environments."""
    if not isinstance(environment, ServedEnvironment):
        yield None
        return
    async with EpisodeServer.open() as server, environment.opened(logs):
        yield server


def _launcher(cluster: ClusterConfig, logs: Path) -> AbstractAsyncContextManager[WorkerLauncher]:
    if cluster.launcher == "local":
        places = [slot[0] for slot in cluster.placement or ()]
        return LocalLauncher.open(logs, slot_devices(cluster), places)
    from libra.backends.launch.ray import open_on_ray  # needs the library of an extra

    return open_on_ray(cluster, logs)


class MemoryWatch:
    """Measures the memory of this process, and of the process trees under `roots`, while its context is open."""

    def __init__(self, roots: Callable[[], Sequence[int]]) -> None:
        self._roots = roots
        self._task: asyncio.Task[None] | None = None
        self._peak = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def peak(self) -> int:
        """Peak memory in bytes until now."""
        self._peak = max(self._peak, await asyncio.to_thread(self._proportional_set_size))
        return self._peak

    async def _watch(self) -> None:
        while True:
            await self.peak()
            await asyncio.sleep(_MEMORY_SECONDS)

    def _proportional_set_size(self) -> int:
        processes = [psutil.Process(os.getpid())]
        for pid in self._roots():
            with suppress(psutil.Error):
                root = psutil.Process(pid)
                processes += [root, *root.children(recursive=True)]
        total = 0
        for process in processes:
            with suppress(psutil.Error):  # it ended during the measurement
                total += process.memory_full_info().pss
        return total
