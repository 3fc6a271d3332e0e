"""The worker processes of a run: starts, frees and ends them, and keeps engines on the current weights.

Invariant: a slot has one computing process, and starts another only after the last has ended or sleeps. Work is never
lost: when an engine changes role or is lost, its turns continue on other engines after their last token. An engine in
service has the current weights, or is about to load them.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from libra.backends.devices import CPU
from libra.backends.grpo.trainers import DivergedError, Trainers, start_order
from libra.backends.launch.fork_server import ForkError
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import LOCAL, AgentLauncher, RunWeights, WorkerLauncher, WorkerLink
from libra.backends.machine import served_dtype
from libra.backends.protocols import Engine, Trainer
from libra.backends.transport.engine_messages import DeviceLoan, KVBufferPlace, LoadWeights, StartEngine
from libra.backends.transport.messages import Acknowledged, Precision, Ready
from libra.backends.transport.shared_memory import BUFFERS
from libra.backends.transport.trainer_messages import LoadCheckpoint, Publish, Published
from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.kv_handover import SAVE_SECONDS
from libra.config.run import ShapeConfig, TrainingConfig
from libra.exec.background import background
from libra.exec.executor import Executor
from libra.exec.journal import Journal, ProcessStarted, SessionStarted, WeightsPublished
from libra.exec.pool import WorkerPool
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.loop.checkpoint import set_aside
from libra.loop.fleet import PublishedWeights, RunObserver, ServingEngine, ServingFleet
from libra.loop.sleeping import SleepingEngines
from libra.plan.allocation import ONE_DEVICE, Allocation
from libra.plan.options.slots import longest_context
from libra.plan.transition import Duty, Role, Transition
from libra.records.files import writing

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

# Time for which an engine that is freed may continue its turns. To stop a turn costs a prefill of its context on
# another engine, or a KV transfer: tenths of a second to seconds for all turns of an engine. Waiting as long as
# stopping costs, and stopping then, never costs much more than twice the better of the two (ski rental; Karlin et al.
# 1988).
_GRACE_SECONDS = 1.0

# Time after `_GRACE_SECONDS` in which the engine's turns leave it, and the KV that they need is saved. Other engines
# compute again what was not saved in time.
_LEAVING_SECONDS = SAVE_SECONDS


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings for the workers of a session."""

    training: TrainingConfig
    engines: Mapping[str, ShapeConfig]  # all shapes that an engine may have, that on lent devices included
    share: float  # of one core, per CPU slot
    port: int  # at which replicas meet; 0: any free port
    seed: int
    model: Path  # directory
    precision: Precision
    kv_bytes: Callable[[int], int]  # bytes of one token's KV on each GPU of an engine with that many GPUs
    version: int  # of the weights at the start of the session: the optimiser steps made before it
    checkpoint: Path | None  # with these weights; None: they are the model's own
    loans: Mapping[str, DeviceLoan] = field(default_factory=dict)  # of workers on devices that serve users

    @property
    def longest_context(self) -> int:
        return longest_context(self.engines)


@dataclass(eq=False)
class SlotProcesses:
    """The `ProcessController` of a run on slots; each slot runs one replica or one engine."""

    launcher: WorkerLauncher
    pool: WorkerPool
    fleet: ServingFleet
    settings: WorkerSettings
    journal: Journal
    observer: RunObserver
    lenders: AgentLauncher | None = None  # the launcher, if some of its slots belong to agents

    def __post_init__(self) -> None:
        self.lost: Callable[[str, str], None] = lambda worker, why: None  # called with a lost worker's name, and why
        self._layout: Ready
        self._published: PublishedWeights
        self._trainers: Trainer | None = None
        self._handles: dict[str, Handle] = {}  # of every worker's latest process, except sleeping engines
        self._sleeping = SleepingEngines(self.launcher)

    @property
    def trainers(self) -> Trainer:
        """The training side. It exists once the first core replica has started."""
        assert self._trainers is not None
        return self._trainers

    @property
    def step_allowance(self) -> float:
        return 0.0 if self._trainers is None else self._trainers.step_allowance

    def require_core(self) -> None:
        if self._trainers is not None:
            self._trainers.require_core()

    def unsupported(self, transition: Transition) -> str | None:
        wanted, slots = transition.after, {worker.id for worker in self.pool.all()}
        if wanted.layout != ONE_DEVICE:
            return f"layout {wanted.layout}: each slot trains one whole replica; a replica cannot span several slots"
        elsewhere = [move.worker for move in transition.moves if move.worker not in slots]
        if elsewhere:
            return f"placement on {elsewhere[0]}: the slots of this run are {', '.join(sorted(slots))}"
        unknown = [bucket.shape for bucket in wanted.buckets if bucket.shape not in self.settings.engines]
        if unknown:
            return f"engine {unknown[0]}: the configuration has {', '.join(sorted(self.settings.engines))}"
        return None

    def offers(self, slot: int) -> bool:
        return self.launcher.offers(slot)

    async def free(self, worker: str, duty: Duty, then: Duty) -> None:
        if duty.role is Role.TRAIN:
            await (await self.trainers.leave(worker)).stop()
            return
        instance = self.fleet.remove(worker)
        if instance is None:
            raise WorkerLostError(f"engine {worker} is not in service")
        engine = instance.handle
        await engine.drained(_GRACE_SECONDS)
        await engine.vacate(_LEAVING_SECONDS)  # turns continue on other engines, with their KV if a transfer pays
        if then.role is Role.TRAIN and isinstance(engine, EngineHandle) and self._sleeps(engine.link, instance.shape):
            await self._sleeping.lay(engine, instance.shape)
            del self._handles[worker]
        else:
            await engine.stop()

    async def start(self, worker: str, duty: Duty) -> None:
        if duty.shape is None:
            await self._start_trainer(worker)
        elif self.pool[worker].lent is not None and worker not in self.settings.loans:
            await self._borrow_engine(worker, duty.shape)
        else:
            await self._start_engine(worker, duty.shape)

    def end(self, worker: str, why: str) -> None:
        self.fleet.remove(worker)
        handle = self._handles.get(worker)
        if handle is not None:
            handle.declare_lost(why)
            self.launcher.kill(handle.link)

    def route(self, allocation: Allocation) -> None:
        self.fleet.reallocate(allocation)

    async def publish(self, version: int, buffer: int, checksum: int) -> list[float]:
        """Have every engine load the new weights between two of its iterations; returns the seconds of each load."""
        self.journal.note(WeightsPublished(version))
        self._published.current = LoadWeights(version, buffer, checksum)
        if self.lenders is not None:
            self.lenders.publish(self._published.current)
        return await self.reload()

    async def save_final(self, directory: Path) -> None:
        """Save the trained model in Hugging Face layout, with the tokenizer and chat template of the initial model.
        Raises `DiskError`."""
        await self.trainers.save(directory, optimiser=False)
        with writing(directory):
            for name in _TOKENIZER:
                if (file := self.settings.model / name).is_file():
                    shutil.copy(file, directory / name)

    async def reload(self) -> list[float]:
        """Have every engine load the current weights, even if it has them; returns the seconds of each load."""
        own = []
        for entry in self.fleet.instances():
            if entry.handle.name in self.settings.loans:  # a step does not wait for a lender
                background(self._load_late(entry.handle))
            elif not entry.handle.lent:  # engines of agents follow the weights that the agents announce
                own.append(entry.handle)
        seconds = await asyncio.gather(*map(self._load_or_lose, own))
        return [each for each in seconds if each is not None]

    def declare_dead(self) -> None:
        """Declare workers lost whose processes ended without closing a channel."""
        for handle in list(self._handles.values()):
            if not handle.lost and not self.launcher.exists(handle.link):
                handle.declare_lost("its process is gone")

    async def stop(self) -> None:
        """End all workers in order; the launcher kills those that do not end."""
        await asyncio.gather(self._sleeping.stop(), *(handle.stop() for handle in self._handles.values()))

    def _sleeps(self, link: WorkerLink, shape: str) -> bool:
        """Whether an engine of this shape stays asleep in its slot while the slot trains."""
        changes_sides = Role.TRAIN in self.pool[link.name].allowed
        return changes_sides and link.device != CPU and self.settings.engines[shape].sleeps

    async def _vacated(self, name: str) -> None:
        """Wait until the worker's latest process has ended completely."""
        before = self._handles.get(name)
        if before is not None:
            await self.launcher.gone(before.link)
            del self._handles[name]  # only now, since the next start here must also wait for the process to end

    async def _spawn(self, name: str) -> WorkerLink:
        await self._vacated(name)
        try:
            link = await self.launcher.spawn(name, self.pool[name].slot)
        except ForkError as error:
            raise WorkerFailedError(str(error)) from None
        self.journal.commit(ProcessStarted(name, link.pid))
        return link

    async def _start_trainer(self, name: str) -> None:
        training, began = self.settings.training, time.monotonic()
        handle = self._handles[name] = Handle(await self._spawn(name), self.lost)
        ready = await handle.start(
            start_order(
                self.settings.model,
                training,
                learning_rate=training.learning_rate,
                precision=self.settings.precision,
                seed=self.settings.seed,
                share=self.settings.share if handle.link.device == CPU else handle.link.device.share,
                link=handle.link,
                hashed=handle.node == LOCAL and self.lenders is None,
            )
        )
        self._layout = ready
        if self._trainers is not None:
            held_seconds = await self._trainers.join(handle, core=self.pool[name].allowed == {Role.TRAIN})
            self.observer.joined(name, time.monotonic() - began, held_seconds)
        else:
            await self._open_training(handle)

    async def _open_training(self, core: Handle) -> None:
        """Begin training with the first core replica. It has the initial state, and provides the layout of the
        weights."""
        version, checkpoint = self.settings.version, self.settings.checkpoint
        if checkpoint is not None:
            await core.ask(LoadCheckpoint(str(checkpoint)), Acknowledged)
        buffer = version % BUFFERS
        first = await core.ask(Publish(version, buffer), Published)
        if first.diverged and checkpoint is not None:
            raise DivergedError(f"{checkpoint} is damaged: {first.diverged}; it is now {set_aside(checkpoint).name}")
        if first.diverged:
            raise DivergedError(f"the model in {self.settings.model} is damaged: {first.diverged}; give another model")
        trainers = Trainers(core, lambda replica: self.launcher.kill(replica.link), port=self.settings.port)
        current = LoadWeights(version, buffer, first.checksum)
        self._published = PublishedWeights(self.launcher, trainers, self._layout.buffer_bytes, current, self.observer)
        self._trainers = trainers
        if self.lenders is not None:
            self.lenders.begin(RunWeights(self._layout.layout, self._layout.buffer_bytes, current))

    async def _start_engine(self, name: str, shape: str) -> None:
        await self._vacated(name)
        handle = await self._woken(name, shape) or await self._new_engine(name, shape)
        size = self.settings.engines[shape]
        async with self.trainers.boundary:  # no step may overwrite the buffer while it is read
            while handle.version != self._published.current.version:  # a step may publish newer weights meanwhile
                await self._published.load(handle)
            self.fleet.add(ServingEngine(handle, shape, min(size.max_model_len, size.kv_tokens)))

    async def _woken(self, name: str, shape: str) -> EngineHandle | None:
        """Wake the sleeping engine of this shape in the slot; None if the slot has none, or if it could not wake."""
        handle = await self._sleeping.of(name, shape)
        if handle is None:
            return None
        self._handles[name] = handle  # so that `end` finds it
        if await self._sleeping.wake(handle):
            return handle
        self.launcher.kill(handle.link)
        if self.pool[name].role is Role.FAILED:
            raise WorkerLostError(f"worker {name} was given up while its engine woke")
        return None

    async def _new_engine(self, name: str, shape: str) -> EngineHandle:
        size = self.settings.engines[shape]
        loan = self.settings.loans.get(name)

        def lost(name: str, why: str) -> None:
            if not self._sleeping.has(handle):
                self.lost(name, why)

        handle = EngineHandle(await self._spawn(name), lost, None if loan is None else self._recalled)
        self._handles[name] = handle
        device = handle.link.device
        gpus = max(1, len(device.gpus))
        await handle.start(
            StartEngine(
                model_directory=str(self.settings.model),
                max_model_len=size.max_model_len,
                max_num_seqs=size.max_num_seqs,
                dtype=served_dtype(self.settings.precision),
                kv_cache_bytes=size.kv_tokens * self.settings.kv_bytes(gpus),  # vLLM counts the bytes of one GPU
                layout=self._layout.layout,
                buffer_bytes=self._layout.buffer_bytes,
                seed=self.settings.seed * 1000 + self.pool[name].slot,
                # The grants of a lent device limit its share. The engine's other work uses no device: with pauses for
                # that work too, serving would have the device after each of the engine's steps.
                share=self.settings.share if loan is None and device == CPU else 1.0,
                cores=handle.link.own_cores,
                refresh_kv=self.settings.training.kv_on_update == "refresh",
                kv=self._kv_place(handle),
                loan=loan,
                device=device.kind,
                gpus=gpus,
                memory=device.share,
                max_num_batched_tokens=size.max_num_batched_tokens,
                graphs=size.graphs and device != CPU,
                asynchronous=size.asynchronous and device != CPU and loan is None,
                sleeps=self._sleeps(handle.link, shape),
            )
        )
        return handle

    async def _borrow_engine(self, name: str, shape: str) -> None:
        """Start an engine on an agent's device. It serves once weights have arrived; no caller waits for them."""
        assert self.lenders is not None
        size = self.settings.engines[shape]
        handle = EngineHandle(await self._spawn(name), self.lost, self._recalled, self._took_weights)
        self._handles[name] = handle
        await self.lenders.join(handle)
        self.fleet.add(ServingEngine(handle, shape, min(size.max_model_len, size.kv_tokens)))

    def _kv_place(self, handle: Engine) -> KVBufferPlace | None:
        """The buffer for the engine's KV transfers; None if it never transfers KV."""
        handover = self.fleet.handover
        if handle.link.device != CPU:
            return None  # GPUs compute a context again instead
        if handover is None or not handover.may_pay(self.settings.longest_context):
            return None
        return handover.place(handle)

    async def _load_late(self, handle: Engine) -> None:
        """Load weights into an engine until it has the current version."""
        while not handle.lost and handle.version < self._published.current.version:
            wanted = self._published.current.version
            try:
                await self._published.load(handle)
            except WorkerLostError:
                return
            except (WorkerFailedError, TimeoutError) as error:
                if wanted == self._published.current.version:  # otherwise newer ones replaced these
                    self.lost(handle.name, f"it could not take weights v{wanted}: {error}")
                    return
        self.fleet.renewed()

    def _took_weights(self, handle: EngineHandle, seconds: float) -> None:
        self.observer.load(handle.name)
        self.observer.weights(handle.name, handle.version, seconds)
        self.fleet.renewed()

    def _recalled(self, handle: EngineHandle) -> None:
        """Report that the device of an engine is recalled, or lent again. A recalled engine moves its turns to other
        engines."""
        self.observer.recalled(handle.name, handle.away)
        self.fleet.renewed()
        if handle.away:
            background(handle.vacate(_LEAVING_SECONDS))  # its turns continue on other engines

    async def _load_or_lose(self, handle: Engine) -> float | None:
        """Load the current weights; returns the seconds. An engine that cannot load them is declared lost, since it
        must not continue with old weights; returns None then."""
        try:
            return await self._published.load(handle)
        except WorkerLostError:
            return None  # its channel reports the loss; no step waits for the engine
        except (WorkerFailedError, TimeoutError) as error:
            self.lost(handle.name, f"it could not take weights v{self._published.current.version}: {error}")
            return None


RunExecutor = Executor[SlotProcesses]


def begin_session(processes: SlotProcesses) -> RunExecutor:
    """An executor for these processes; nothing is started yet."""
    settings, journal, most = processes.settings, processes.journal, processes.settings.longest_context
    longest = {name for name, shape in settings.engines.items() if shape.max_model_len == most}
    executor = Executor(processes.pool, processes, journal, processes.observer, longest, most)
    processes.lost, processes.launcher.slots_changed = executor.lose, executor.slots_changed
    journal.commit(SessionStarted(settings.version))
    executor.watch()
    return executor
