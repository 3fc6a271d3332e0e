"""The thin executor: carries a plan out, worker by worker, and keeps the truth about who is what.

Invariant: every prefix of the changes is a state that the run can go on in. A change that fails leaves its worker
failed and drops the rest; planning starts again from what is true. Work is never lost: a turn whose engine is to do
something else, or is gone, goes on elsewhere after its last token.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libra.config import RunConfig
from libra.exec.assignment import Change, assign, current_allocation
from libra.exec.fleet import Fleet, Instance
from libra.exec.handles import EngineHandle, Handle, WorkerFailedError, WorkerLostError
from libra.exec.journal import Journal
from libra.exec.launch_local import LocalLauncher
from libra.exec.messages import (
    Done,
    LoadCheckpoint,
    LoadWeights,
    Publish,
    Published,
    Ready,
    SaveCheckpoint,
    StartEngine,
    StartTrainer,
)
from libra.exec.pool import DEADLINES, Pool, Role, Worker
from libra.exec.trainers import Trainers
from libra.exec.weights import BUFFERS
from libra.plan.problem import Allocation

_WATCH_SECONDS = 1.0  # between two looks at the workers' processes
# For which an engine that is to do something else may go on with its turns. To stop one costs computing its context
# again elsewhere, tenths of a second to seconds for all turns of an engine. Who waits about as long as stopping costs,
# and stops then, never pays much more than twice the better of the two (ski rental; Karlin et al. 1988).
_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told when a worker changes role or is lost, and when an engine takes weights."""

    role: Callable[[Worker], None]
    lost: Callable[[str, str], None]
    weights: Callable[[str, int, float], None]


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a plan's changes: seconds of each change that was made, and why the rest was dropped."""

    seconds: tuple[tuple[Change, float], ...]
    failure: str | None


class Executor:
    def __init__(
        self,
        launcher: LocalLauncher,
        pool: Pool,
        fleet: Fleet,
        config: RunConfig,
        model_directory: Path,
        kv_bytes: int,
        journal: Journal,
        watcher: Watcher,
    ) -> None:
        self._launcher, self._config, self._journal, self._watcher = launcher, config, journal, watcher
        self._model_directory, self._kv_bytes = model_directory, kv_bytes
        self._cores = sorted(os.sched_getaffinity(0))
        self._layout: Ready
        self._current = LoadWeights(0, 0, 0)
        self.pool, self.fleet = pool, fleet
        self.trainers: Trainers
        self.longest_context = max(shape.max_model_len for shape in config.engines.values())
        self._handles: dict[str, Handle] = {}
        self._watch: asyncio.Task[None] | None = None

    async def start(self, allocation: Allocation, version: int, checkpoint: Path | None) -> None:
        """Bring up the first allocation, with weight `version`. The core trainer is first: it knows the layout."""
        self._watch = asyncio.create_task(self._watch_workers())
        core = next(w for w in self.pool.all() if w.allowed == {Role.TRAIN})
        handle = await self._start_trainer(core.id)
        if checkpoint is not None:
            await handle.ask(LoadCheckpoint(str(checkpoint)), Done)
        self.trainers = Trainers(handle, self._find_port)
        self._become(core.id, Role.TRAIN)
        buffer = version % BUFFERS
        first = await handle.ask(Publish(version, buffer), Published)
        self._current = LoadWeights(version, buffer, first.checksum)
        changes = assign(self.pool.all(), allocation)
        results = await asyncio.gather(*(self._change(change) for change in changes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def apply(self, wanted: Allocation) -> Applied:
        """Change what differs, one worker after the other."""
        self._journal.commit("plan", replicas=wanted.replicas, buckets=[str(bucket) for bucket in wanted.buckets])
        done: list[tuple[Change, float]] = []
        for change in assign(self.healthy(), wanted):
            began = time.monotonic()
            self._journal.commit("intend", worker=change.worker, role=change.role, shape=change.shape)
            try:
                await self._change(change)
            except (WorkerLostError, WorkerFailedError, TimeoutError) as error:
                self.lose(change.worker, str(error))
                return Applied(tuple(done), f"{change.worker} could not become {change.role}: {error}")
            done.append((change, time.monotonic() - began))
            self._journal.commit("done", worker=change.worker, role=change.role, shape=change.shape)
        self.fleet.reallocate(wanted)
        return Applied(tuple(done), None)

    async def publish(self, version: int, buffer: int, checksum: int) -> list[float]:
        """Every engine takes the new weights between two of its iterations; returns the seconds of each."""
        self._current = LoadWeights(version, buffer, checksum)
        return await asyncio.gather(*(self._reload(entry.handle) for entry in self.fleet.instances()))

    async def restart(self, name: str) -> float:
        """End a worker's process and bring it back into the same role; returns the seconds it was out of service."""
        worker = self.pool[name]
        began = time.monotonic()
        await self._change(Change(name, worker.role, worker.shape))
        return time.monotonic() - began

    async def reload(self) -> list[float]:
        """Give every engine the current weights once more; returns the seconds of each."""
        return await self.publish(self._current.version, self._current.buffer, self._current.checksum)

    async def save_final(self, directory: Path) -> None:
        """The trained model, in Hugging Face layout, with the tokenizer it started from."""
        await self.trainers.core.ask(SaveCheckpoint(str(directory.absolute()), optimiser=False), Done)
        shutil.copy(self._model_directory / "tokenizer.json", directory / "tokenizer.json")

    def healthy(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.pool.all() if worker.role is not Role.FAILED)

    def allocation(self) -> Allocation | None:
        """What the healthy workers do now."""
        return current_allocation(self.pool.all(), self.fleet.allocation, self.longest_context)

    def lose(self, name: str, why: str) -> None:
        """A worker is gone for good: its slot stays empty, its turns go on elsewhere."""
        if self.pool[name].role is Role.FAILED:
            return
        self._journal.commit("lost", worker=name, why=why)
        self.fleet.remove(name)
        self._become(name, Role.FAILED)
        self._watcher.lost(name, why)
        remaining = self.allocation()
        if remaining is not None:
            self.fleet.reallocate(remaining)

    async def stop(self) -> None:
        """End all workers in order; the launcher ends whatever does not go."""
        if self._watch is not None:
            self._watch.cancel()
        handles: list[Handle] = [*self.trainers.replicas(), *(entry.handle for entry in self.fleet.instances())]
        await asyncio.gather(*(handle.stop() for handle in handles))

    async def _change(self, change: Change) -> None:
        await self._free(change.worker)
        self._become(change.worker, Role.JOINING, change.shape)
        if change.role is Role.TRAIN:
            handle = await self._start_trainer(change.worker)
            await self.trainers.join(handle, core=self.pool[change.worker].allowed == {Role.TRAIN})
        else:
            assert change.shape is not None
            await self._start_engine(change.worker, change.shape)
        self._become(change.worker, change.role, change.shape)

    async def _free(self, name: str) -> None:
        """Let a worker finish what it does and end its process."""
        worker = self.pool[name]
        if worker.role is Role.TRAIN:
            self._become(name, Role.DRAINING)
            handle = await self.trainers.leave(name)
            await handle.stop()
        elif worker.role is Role.ROLLOUT:
            instance = self.fleet.remove(name)
            self._become(name, Role.DRAINING, worker.shape)
            if instance is not None:
                await instance.handle.drained(_GRACE_SECONDS)
                await instance.handle.stop()  # reports what turns have by then, and they go on elsewhere
        if self.pool[name].role is Role.DRAINING:
            self._become(name, Role.IDLE)

    async def _start_trainer(self, name: str) -> Handle:
        if self.pool[name].role is Role.IDLE:
            self._become(name, Role.JOINING)
        training = self._config.training
        handle = self._handles[name] = Handle(await self._launcher.spawn(name), self.lose)
        ready = await handle.start(
            StartTrainer(
                model_directory=str(self._model_directory),
                learning_rate=training.learning_rate,
                clip=training.clip,
                denominator=training.denominator,
                token_constant=training.token_constant,
                micro_batch_tokens=training.micro_batch_tokens,
                precision=training.precision,
                seed=self._config.seed,
                share=self._config.cluster.share,
                cores=self._core(name),
            )
        )
        self._layout = ready
        self._journal.commit("worker", worker=name, pid=handle.pid)
        return handle

    async def _start_engine(self, name: str, shape: str) -> None:
        size = self._config.engines[shape]
        handle = EngineHandle(await self._launcher.spawn(name), self.lose)
        self._handles[name] = handle
        await handle.start(
            StartEngine(
                model_directory=str(self._model_directory),
                max_model_len=size.max_model_len,
                max_num_seqs=size.max_num_seqs,
                kv_cache_bytes=size.kv_tokens * self._kv_bytes,
                layout=self._layout.layout,
                buffer_bytes=self._layout.buffer_bytes,
                seed=self._config.seed * 1000 + self.pool[name].slot,
                share=self._config.cluster.share,
                cores=self._core(name),
                refresh_kv=self._config.training.kv_on_update == "refresh",
            )
        )
        self._journal.commit("worker", worker=name, pid=handle.pid)
        async with self.trainers.boundary:  # no step may overwrite the buffer while it is read
            await self._load(handle)
            self.fleet.add(Instance(handle, shape, min(size.max_model_len, size.kv_tokens)))

    async def _watch_workers(self) -> None:
        """Notice what a channel does not tell: a process that is gone, a worker that overstays a passing role."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            for handle in list(self._handles.values()):
                if not handle.lost and not Path(f"/proc/{handle.pid}").exists():
                    handle.declare_lost("its process is gone")
            for worker in self.pool.overdue(time.monotonic()):
                self.lose(worker.id, f"it was {worker.role} for more than {DEADLINES[worker.role]:.0f} s")

    async def _reload(self, handle: EngineHandle) -> float:
        try:
            return await self._load(handle)
        except WorkerLostError:
            return 0.0  # reported by its channel; nobody waits for it

    async def _load(self, handle: EngineHandle) -> float:
        seconds = await handle.load(self._current)
        self._watcher.weights(handle.name, self._current.version, seconds)
        return seconds

    def _become(self, name: str, role: Role, shape: str | None = None) -> None:
        worker = self.pool.become(name, role, time.monotonic(), shape)
        self._watcher.role(worker)

    def _core(self, name: str) -> tuple[int, ...]:
        return (self._cores[self.pool[name].slot % len(self._cores)],)

    def _find_port(self) -> int:
        """The configured port, or any free one. (A taken port is refused before anything starts.)"""
        if self._config.cluster.port:
            return self._config.cluster.port
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
