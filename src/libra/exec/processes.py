"""The worker processes: how one is started, freed and ended, and what engines hold.

Invariant: a slot has one process, and the next one only when the last is gone. Work is never lost: a turn whose engine
is to do something else, or is gone, goes on elsewhere after its last token. An engine in service holds the current
weights, or is about to take them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from libra.backends.arithmetic import served_dtype
from libra.backends.grpo.trainers import Trainers
from libra.backends.launch.handles import EngineHandle, Handle, WorkerFailedError, WorkerLostError
from libra.backends.launch.launcher import CopyError, ForkError, Launcher, SourceLostError, WorkerLink
from libra.backends.transport.messages import (
    Done,
    KVBufferPlace,
    LoadCheckpoint,
    LoadWeights,
    Publish,
    Published,
    Ready,
    StartEngine,
    StartTrainer,
)
from libra.backends.transport.weights import BUFFERS
from libra.backends.vllm.kv_handover import SAVE_SECONDS
from libra.config.run import RunConfig
from libra.exec.beginning import Beginning
from libra.exec.journal import Journal, Process
from libra.exec.workers import Duty, Pool, Role
from libra.loop.fleet import Fleet, Instance
from libra.plan.problem import Allocation
from libra.plan.request import longest_context

# For which an engine that is to do something else may go on with its turns. To stop one costs computing its context
# again elsewhere, or handing it over: tenths of a second to seconds for all turns of an engine. Who waits about as long
# as stopping costs, and stops then, never pays much more than twice the better of the two (ski rental; Karlin et al.
# 1988).
_GRACE_SECONDS = 1.0

# For which it then waits until turns have left and the KV that they want is put down; more is computed again.
_LEAVING_SECONDS = SAVE_SECONDS


class Watcher(Protocol):
    """Who is told what processes do beside their orders."""

    def load(self, worker: str) -> None:
        """An engine is told to take new weights."""
        ...

    def weights(self, worker: str, version: int, seconds: float) -> None:
        """It has taken them, and stood still for so long."""
        ...

    def joined(self, worker: str, seconds: float, held_seconds: float) -> None:
        """A replica takes part in training, so long after its start; for its entry a step waited so long."""
        ...


class Processes:
    """The hands of a `Mover`, with real processes."""

    def __init__(
        self,
        launcher: Launcher,
        pool: Pool,
        fleet: Fleet,
        config: RunConfig,
        beginning: Beginning,
        journal: Journal,
        watcher: Watcher,
        lost: Callable[[str, str], None],
    ) -> None:
        """`lost` is told the name of a worker that went away, and why."""
        self._launcher, self._pool, self._config, self._beginning = launcher, pool, config, beginning
        self._journal, self._watcher, self._lost = journal, watcher, lost
        self._layout: Ready
        self._current: LoadWeights
        self.fleet = fleet
        self._trainers: Trainers | None = None
        self._handles: dict[str, Handle] = {}  # the latest of every worker

    @property
    def trainers(self) -> Trainers:
        """The training side; it begins with the first core replica."""
        assert self._trainers is not None
        return self._trainers

    @property
    def step_seconds(self) -> float:
        """That a training step may take."""
        return 0.0 if self._trainers is None else self._trainers.step_allowance

    async def free(self, worker: str, duty: Duty) -> None:
        """See `Hands`."""
        if duty.role is Role.TRAIN:
            await (await self.trainers.leave(worker)).stop()
            return
        instance = self.fleet.remove(worker)
        if instance is None:
            raise WorkerLostError(f"engine {worker} is not in service")
        await instance.handle.drained(_GRACE_SECONDS)
        await instance.handle.vacate(_LEAVING_SECONDS)  # turns go on elsewhere, with their KV where that pays
        await instance.handle.stop()

    async def start(self, worker: str, duty: Duty) -> None:
        """See `Hands`."""
        if duty.shape is None:
            await self._start_trainer(worker)
        else:
            await self._start_engine(worker, duty.shape)

    def end(self, worker: str, why: str) -> None:
        """See `Hands`."""
        self.fleet.remove(worker)
        handle = self._handles.get(worker)
        if handle is not None:
            handle.declare_lost(why)
            self._launcher.kill(handle.link)

    def route(self, allocation: Allocation) -> None:
        """See `Hands`."""
        self.fleet.reallocate(allocation)

    async def publish(self, version: int, buffer: int, checksum: int) -> list[float]:
        """Every engine takes the new weights between two of its iterations; returns the seconds of each."""
        self._current = LoadWeights(version, buffer, checksum)
        return await self.reload()

    async def reload(self) -> list[float]:
        """Every engine takes the current weights, if it has them or not; returns the seconds of each."""
        seconds = await asyncio.gather(*(self._load_or_lose(entry.handle) for entry in self.fleet.instances()))
        return [each for each in seconds if each is not None]

    def declare_dead(self) -> None:
        """Notice what a channel does not tell: a process that is gone."""
        for handle in list(self._handles.values()):
            if not handle.lost and not self._launcher.exists(handle.link):
                handle.declare_lost("its process is gone")

    async def stop(self) -> None:
        """End all in order; the launcher ends whatever does not go."""
        await asyncio.gather(*(handle.stop() for handle in self._handles.values()))

    async def _spawn(self, name: str) -> WorkerLink:
        before = self._handles.get(name)
        if before is not None:
            await self._launcher.gone(before.link)
            del self._handles[name]  # not before that: who starts here next has to wait for it too
        try:
            link = await self._launcher.spawn(name, self._pool[name].slot)
        except ForkError as error:
            raise WorkerFailedError(str(error)) from None
        self._journal.commit(Process(name, link.pid))
        return link

    async def _start_trainer(self, name: str) -> None:
        training, began = self._config.training, time.monotonic()
        handle = self._handles[name] = Handle(await self._spawn(name), self._lost)
        ready = await handle.start(
            StartTrainer(
                model_directory=str(self._beginning.model),
                learning_rate=training.learning_rate,
                clip=training.clip,
                denominator=training.denominator,
                token_constant=training.token_constant,
                temperature=training.temperature,
                micro_batch_tokens=training.micro_batch_tokens,
                precision=self._beginning.precision,
                seed=self._config.seed,
                share=self._config.cluster.share,
                cores=(handle.link.core,),
                processes=training.processes,
                sharding=training.sharding,
            )
        )
        self._layout = ready
        if self._trainers is not None:
            held_seconds = await self._trainers.join(handle, core=self._pool[name].allowed == {Role.TRAIN})
            self._watcher.joined(name, time.monotonic() - began, held_seconds)
        else:
            await self._open_training(handle)

    async def _open_training(self, core: Handle) -> None:
        """The first core replica: it has the state to begin with, and knows the layout of the weights."""
        version, checkpoint = self._beginning.version, self._beginning.checkpoint
        if checkpoint is not None:
            await core.ask(LoadCheckpoint(str(checkpoint)), Done)
        buffer = version % BUFFERS
        first = await core.ask(Publish(version, buffer), Published)
        self._current = LoadWeights(version, buffer, first.checksum)
        self._trainers = Trainers(
            core, lambda replica: self._launcher.kill(replica.link), port=self._config.cluster.port
        )

    async def _start_engine(self, name: str, shape: str) -> None:
        size = self._config.engines[shape]
        handle = EngineHandle(await self._spawn(name), self._lost)
        self._handles[name] = handle
        await handle.start(
            StartEngine(
                model_directory=str(self._beginning.model),
                max_model_len=size.max_model_len,
                max_num_seqs=size.max_num_seqs,
                dtype=served_dtype(self._beginning.precision),
                kv_cache_bytes=size.kv_tokens * self._beginning.kv_bytes,
                layout=self._layout.layout,
                buffer_bytes=self._layout.buffer_bytes,
                seed=self._config.seed * 1000 + self._pool[name].slot,
                share=self._config.cluster.share,
                cores=(handle.link.core,),
                refresh_kv=self._config.training.kv_on_update == "refresh",
                kv=self._kv_place(handle),
            )
        )
        async with self.trainers.boundary:  # no step may overwrite the buffer while it is read
            while handle.version != self._current.version:  # another may be published meanwhile
                await self._load(handle)
            self.fleet.add(Instance(handle, shape, min(size.max_model_len, size.kv_tokens)))

    def _kv_place(self, handle: EngineHandle) -> KVBufferPlace | None:
        """Where the engine hands KV over; None where it never will, and need not be prepared in every iteration."""
        handover = self.fleet.handover
        if handover is None or not handover.may_pay(longest_context(self._config)):
            return None
        return handover.place(handle)

    async def _load(self, handle: EngineHandle) -> float:
        order = self._current
        await self._bring(order, handle.link)
        self._watcher.load(handle.name)
        seconds = await handle.load(order)
        self._watcher.weights(handle.name, order.version, seconds)
        return seconds

    async def _bring(self, order: LoadWeights, target: WorkerLink) -> None:
        """The worker's node holds the weights when this returns."""
        size, trainers = self._layout.buffer_bytes, self.trainers
        try:
            try:
                await self._launcher.bring(order, size, trainers.publisher.link, target)
            except SourceLostError as error:
                # Every core replica holds the same, until the next step is made.
                if await trainers.publish(order.version, order.buffer) != order.checksum:
                    raise CopyError(f"{error}, and the core replica {trainers.publisher.name} is ahead") from None
                await self._launcher.bring(order, size, trainers.publisher.link, target)
        except CopyError as error:
            raise WorkerFailedError(str(error)) from None

    async def _load_or_lose(self, handle: EngineHandle) -> float | None:
        """An engine that cannot take new weights must not go on with the old ones; None when it is lost with it."""
        try:
            return await self._load(handle)
        except WorkerLostError:
            return None  # reported by its channel; nobody waits for it
        except (WorkerFailedError, TimeoutError) as error:
            self._lost(handle.name, f"it could not take weights v{self._current.version}: {error}")
            return None
