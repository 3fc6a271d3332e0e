"""Training replicas on a tiny model in this process: side by side, and on threads behind real handles."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.state import AcceleratorState
from fakes.samples import RATE, sample

from libra.backends.grpo.elastic import GradientExchange
from libra.backends.grpo.trainer import TrainerProcess
from libra.backends.grpo.trainers import Trainers
from libra.backends.grpo.training_worker import serve_orders
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import WorkerLink
from libra.backends.launch.worker import Pacer
from libra.backends.transport.channel import ControllerChannel, WorkerChannel
from libra.backends.transport.messages import Denominator, Precision
from libra.backends.transport.shared_memory import create_buffer
from libra.backends.transport.trainer_messages import (
    Commit,
    HostRendezvous,
    Prepare,
    Reduced,
    Sample,
    StartTrainer,
    Train,
    Trained,
)

R = TypeVar("R")

HOST = "127.0.0.1"
TOKEN = "0" * 64  # of the rendezvous
PATIENCE = 20.0  # seconds in the exchange


def make_trainer(
    model: Path,
    kind: Denominator = "tokens",
    seed: int = 0,
    micro_batch: int = 1,
    precision: Precision = "bf16",
    temperature: float = 1.0,
) -> TrainerProcess:
    """A replica. `micro_batch` 1 gives every sample its own, so that a batch may be split anywhere without changing the
    rounding of bfloat16. All replicas of one test have one precision: accelerate keeps it for the whole process."""
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != {"bf16": "bf16"}.get(precision, "no"):
        AcceleratorState._reset_state()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    start = StartTrainer(
        str(model), RATE, (0.8, 1.28), kind, 12.0, temperature, micro_batch, precision, seed, 1.0, cores
    )
    descriptor = create_buffer()
    try:
        return TrainerProcess(start, descriptor, Pacer(1.0, cores))
    finally:
        os.close(descriptor)  # the map keeps the memory


BATCH = [
    sample(0, 6, 3, 1.0),
    sample(1, 5, 2, -0.5),
    sample(2, 4, 30, 0.75),
    sample(3, 8, 21, -1.25),
    sample(4, 3, 17, 0.5),
]


def order(samples: Sequence[Sample], version: int = 1) -> Train:
    """A step over `samples`, which are all that this replica has."""
    return Train(version, list(samples), len(samples), sum(sum(s.generated) for s in samples), PATIENCE)


def commit(trainer: TrainerProcess, vote: Reduced, publish_to: int = -1) -> Trained:
    """The verdict is yes."""
    assert not vote.failure
    return trainer.commit(Commit(vote.version, publish_to))


def train(trainer: TrainerProcess, order: Train, publish_to: int = -1) -> Trained:
    """A whole step of one replica that votes for itself."""
    return commit(trainer, trainer.reduce(order), publish_to)


def parameters(trainer: TrainerProcess) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in trainer.part.parameters.values()])


def at_once(*verbs: Callable[[], R]) -> list[R]:
    """Run collectives of several replicas at the same time."""
    with ThreadPoolExecutor(len(verbs)) as threads:
        return [future.result(timeout=60) for future in [threads.submit(verb) for verb in verbs]]


def prepare(exchanges: Sequence[GradientExchange], generation: int, hosts: Sequence[str] = ()) -> int:
    """A membership with ranks in this order, each at its address; returns the port at which they meet."""
    addresses = hosts or [HOST] * len(exchanges)
    port = exchanges[0].host_rendezvous(HostRendezvous(addresses[0], 0, TOKEN))
    for rank, (exchange, address) in enumerate(zip(exchanges, addresses, strict=True)):
        exchange.prepare(Prepare(generation, rank, len(exchanges), address, addresses[0], port, TOKEN))
    return port


class MeanOfMeans(GradientExchange):
    """What must not be done: every replica's own mean, averaged with equal weights."""

    def all_reduce(self, tensor: torch.Tensor, seconds: float) -> float:
        tensor /= max(float(tensor[-1]), 1.0) * self.size
        return super().all_reduce(tensor, seconds)


def regroup(replicas: Sequence[TrainerProcess], generation: int) -> None:
    """All of them into a new membership, ranks in this order."""
    prepare([replica.elastic.exchange for replica in replicas], generation)
    at_once(*(lambda replica=replica: replica.elastic.exchange.enter(generation) for replica in replicas))


def step_together(
    replicas: Sequence[TrainerProcess], shares: Sequence[Sequence[Sample]], version: int = 1
) -> list[Trained]:
    """One step of several replicas, each with its share, who all vote yes."""
    votes = at_once(*(lambda r=r, s=s: r.reduce(order(s, version)) for r, s in zip(replicas, shares, strict=True)))
    return [commit(replica, vote) for replica, vote in zip(replicas, votes, strict=True)]


@dataclass
class Worker:
    handle: Handle
    trainer: TrainerProcess
    thread: threading.Thread

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trainer.part.parameters.items()}


class Crew:
    """Workers that train one model in one precision; `dress` may change a trainer before it serves."""

    def __init__(
        self, model: Path, precision: Precision, micro_batch: int, dress: Callable[[TrainerProcess], None]
    ) -> None:
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
    model: Path,
    precision: Precision,
    micro_batch: int = 1,
    dress: Callable[[TrainerProcess], None] = lambda trainer: None,
) -> AsyncIterator[Crew]:
    made = Crew(model, precision, micro_batch, dress)
    try:
        yield made
    finally:
        await asyncio.gather(*(worker.handle.stop() for worker in made.workers.values()))
        for worker in made.workers.values():
            worker.thread.join(timeout=10)


def _serve(channel: WorkerChannel, trainer: TrainerProcess) -> None:
    with suppress(ConnectionError):  # its handle was closed
        serve_orders(channel, trainer)


def _never(handle: Handle) -> None:
    raise AssertionError(f"{handle.name} is to be killed, and lives in this process")
