"""The thin executor: carries a plan out, worker by worker, and keeps the truth about who is what.

Invariant: what a worker does is decided by the `Mover` and done by the `Processes`; nobody else starts or ends one.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Protocol

from libra.backends.grpo.saving import save_weights
from libra.backends.grpo.trainers import Trainers
from libra.backends.launch.handles import WorkerLostError
from libra.backends.launch.launcher import Launcher, raise_in_loop
from libra.config.run import RunConfig
from libra.exec import processes, transitions
from libra.exec.beginning import Beginning
from libra.exec.journal import Journal, Start, Step
from libra.exec.moves import Move
from libra.exec.processes import Processes
from libra.exec.transitions import Applied, Mover
from libra.exec.workers import Pool, Role, Worker
from libra.loop.fleet import Fleet
from libra.plan.problem import Allocation
from libra.plan.request import longest_context
from libra.records.disk import writing

_WATCH_SECONDS = 1.0  # between two looks at the workers' processes


class Watcher(transitions.Watcher, processes.Watcher, Protocol):
    """Who is told of changes of the pool, of what its processes do, and of slots that come back."""

    def back(self, worker: str) -> None:
        """Its slot, which was lost with its node, can be used again."""
        ...


class Executor:
    def __init__(
        self,
        launcher: Launcher,
        pool: Pool,
        fleet: Fleet,
        config: RunConfig,
        beginning: Beginning,
        journal: Journal,
        watcher: Watcher,
    ) -> None:
        self._launcher, self._pool, self._beginning = launcher, pool, beginning
        self._journal, self._watcher = journal, watcher
        launcher.slots_changed = self._look_for_slots
        self.longest_context = longest_context(config)
        self._processes = Processes(launcher, pool, fleet, config, beginning, journal, watcher, self._lost)
        longest = {name for name, shape in config.engines.items() if shape.max_model_len == self.longest_context}
        self._mover = Mover(pool, self._processes, journal, watcher, longest, self.longest_context)
        self._watch: asyncio.Task[None] | None = None

    @property
    def fleet(self) -> Fleet:
        return self._processes.fleet

    @property
    def trainers(self) -> Trainers:
        return self._processes.trainers

    def healthy(self) -> tuple[Worker, ...]:
        """Workers that do something, or could."""
        return self._pool.healthy()

    def allocation(self) -> Allocation | None:
        """What the workers do now; None when nothing trains or nothing generates."""
        return self._mover.allocation()

    async def start(self, allocation: Allocation) -> None:
        """Bring up the first allocation; see `Mover.start`."""
        self._journal.commit(Start(self._beginning.version))
        self._watch = asyncio.create_task(self._watch_workers())
        self._watch.add_done_callback(raise_in_loop)
        await self._mover.start(allocation)

    async def apply(self, wanted: Allocation) -> Applied:
        """Change what differs; see `Mover.apply`."""
        return await self._mover.apply(wanted)

    def drop_rest(self, why: str) -> None:
        """Let the move that is under way end, and make no further one of its plan."""
        self._mover.drop_rest(why)

    async def restart(self, name: str) -> float:
        """End a worker's process and bring it back into the same role; returns the seconds it was out of service.
        Raises `WorkerLostError` for one that does nothing, and what made it fail."""
        duty = self._pool[name].duty
        if duty.role not in (Role.ROLLOUT, Role.TRAIN):  # idle, or retired
            raise WorkerLostError(f"worker {name} does nothing that it could be restarted for")
        return await self._mover.move(Move(name, duty, duty))

    async def publish(self, version: int, buffer: int, checksum: int) -> list[float]:
        """Every engine takes the new weights between two of its iterations; returns the seconds of each."""
        self._journal.note(Step(version))
        return await self._processes.publish(version, buffer, checksum)

    async def reload(self) -> list[float]:
        """Give every engine the current weights once more; returns the seconds of each."""
        return await self._processes.reload()

    async def save_final(self, directory: Path) -> None:
        """The trained model, in Hugging Face layout, with the tokenizer it started from. Raises `DiskError`."""
        await save_weights(self.trainers, directory, optimiser=False)
        with writing(directory):
            shutil.copy(self._beginning.model / "tokenizer.json", directory / "tokenizer.json")

    async def stop(self) -> None:
        """End all workers in order; the launcher ends whatever does not go."""
        if self._watch is not None:
            self._watch.cancel()
        await self._processes.stop()

    def _lost(self, worker: str, why: str) -> None:
        self._mover.lose(worker, why)

    def _look_for_slots(self) -> None:
        for worker in self._pool.all():
            away = not self._launcher.offers(worker.slot)
            if worker.away != away:
                changed = self._pool.set_away(worker.id, away)
                if not away and not changed.retired:
                    self._watcher.back(worker.id)

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._processes.declare_dead()
            self._mover.fail_overdue(self._processes.step_seconds)
