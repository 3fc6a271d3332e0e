"""Training workers on threads of this process, behind real handles: everything but the processes."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from fakes.replicas import make_trainer

from libra.backends.grpo.trainer import Trainer
from libra.backends.grpo.trainers import Trainers
from libra.backends.grpo.training_worker import TrainingWorker
from libra.backends.launch.handles import Handle
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import ControllerChannel, WorkerChannel
from libra.backends.transport.messages import Precision


@dataclass
class Worker:
    handle: Handle
    trainer: Trainer
    thread: threading.Thread

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trainer.part.parameters.items()}


class Crew:
    """Workers that train one model in one precision; `dress` may change a trainer before it serves."""

    def __init__(self, model: Path, precision: Precision, micro_batch: int, dress: Callable[[Trainer], None]) -> None:
        self._model, self._precision, self._micro_batch, self._dress = model, precision, micro_batch, dress
        self.workers: dict[str, Worker] = {}

    async def hire(self, name: str) -> Worker:
        ours, theirs = socket.socketpair()
        seed = 0 if not self.workers else 7  # others than the first start from something else
        trainer = make_trainer(self._model, "tokens", seed, self._micro_batch, self._precision)
        self._dress(trainer)
        thread = threading.Thread(target=_serve, args=(WorkerChannel(theirs), trainer), daemon=True)
        thread.start()
        handle = Handle(
            WorkerLink(name, os.getpid(), await ControllerChannel.open(ours), (0,), 0), lambda name, why: None
        )
        worker = self.workers[name] = Worker(handle, trainer, thread)
        return worker

    async def assemble(self, *others: str) -> Trainers:
        """`core-0` and those others, joined."""
        trainers = Trainers((await self.hire("core-0")).handle, _never)
        for name in others:
            await trainers.join((await self.hire(name)).handle, core=name.startswith("core"))
        return trainers


@asynccontextmanager
async def crew(
    model: Path, precision: Precision, micro_batch: int = 1, dress: Callable[[Trainer], None] = lambda trainer: None
) -> AsyncIterator[Crew]:
    made = Crew(model, precision, micro_batch, dress)
    try:
        yield made
    finally:
        await asyncio.gather(*(worker.handle.stop() for worker in made.workers.values()))
        for worker in made.workers.values():
            worker.thread.join(timeout=10)


def _serve(channel: WorkerChannel, trainer: Trainer) -> None:
    with suppress(ConnectionError):  # its handle was closed
        TrainingWorker(channel, trainer).run()


def _never(handle: Handle) -> None:
    raise AssertionError(f"{handle.name} is to be killed, and lives in this process")
