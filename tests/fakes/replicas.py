"""Training replicas on a tiny model, side by side in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.state import AcceleratorState

from libra.backends.grpo.elastic import GradientExchange
from libra.backends.grpo.grpo import Denominator
from libra.backends.grpo.trainer import Trainer
from libra.backends.launch.pace import Pacer
from libra.backends.transport.messages import (
    Commit,
    HostRendezvous,
    Precision,
    Prepare,
    Reduced,
    Sample,
    StartTrainer,
    Train,
    Trained,
)
from libra.backends.transport.weights import create_buffer

R = TypeVar("R")

HOST = "127.0.0.1"
TOKENS = 14  # ids that samples are made of, after the special ones
RATE = 1e-3
PATIENCE = 20.0  # seconds in the exchange


def make_trainer(
    model: Path,
    kind: Denominator = "tokens",
    seed: int = 0,
    micro_batch: int = 1,
    precision: Precision = "bf16",
    temperature: float = 1.0,
) -> Trainer:
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
        return Trainer(start, descriptor, Pacer(1.0, cores))
    finally:
        os.close(descriptor)  # the map keeps the memory


def sample(number: int, prompt: int, generated: int, advantage: float) -> Sample:
    length = prompt + generated
    return Sample(
        id=str(number),
        tokens=[4 + (7 * number + 3 * position + position // 5) % TOKENS for position in range(length)],
        generated=[position >= prompt for position in range(length)],
        logprobs=[0.0] * prompt + [-2.3 - 0.05 * (position % 7) for position in range(generated)],
        versions=[-1] * prompt + [0] * generated,
        advantage=advantage,
    )


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


def commit(trainer: Trainer, vote: Reduced, publish_to: int = -1) -> Trained:
    """The verdict is yes."""
    assert not vote.failure
    return trainer.commit(Commit(vote.version, publish_to))


def train(trainer: Trainer, order: Train, publish_to: int = -1) -> Trained:
    """A whole step of one replica that votes for itself."""
    return commit(trainer, trainer.reduce(order), publish_to)


def parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in trainer.part.parameters.values()])


def at_once(*verbs: Callable[[], R]) -> list[R]:
    """Run collectives of several replicas at the same time."""
    with ThreadPoolExecutor(len(verbs)) as threads:
        return [future.result(timeout=60) for future in [threads.submit(verb) for verb in verbs]]


def prepare(exchanges: Sequence[GradientExchange], generation: int, hosts: Sequence[str] = ()) -> int:
    """A membership with ranks in this order, each at its address; returns the port at which they meet."""
    addresses = hosts or [HOST] * len(exchanges)
    port = exchanges[0].host_rendezvous(HostRendezvous(addresses[0], 0))
    for rank, (exchange, address) in enumerate(zip(exchanges, addresses, strict=True)):
        exchange.prepare(Prepare(generation, rank, len(exchanges), address, addresses[0], port))
    return port


def regroup(replicas: Sequence[Trainer], generation: int) -> None:
    """All of them into a new membership, ranks in this order."""
    prepare([replica.exchange for replica in replicas], generation)
    at_once(*(lambda replica=replica: replica.exchange.enter(generation) for replica in replicas))


def step_together(replicas: Sequence[Trainer], shares: Sequence[Sequence[Sample]], version: int = 1) -> list[Trained]:
    """One step of several replicas, each with its share, who all vote yes."""
    votes = at_once(*(lambda r=r, s=s: r.reduce(order(s, version)) for r, s in zip(replicas, shares, strict=True)))
    return [commit(replica, vote) for replica, vote in zip(replicas, votes, strict=True)]
