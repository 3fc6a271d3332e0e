"""Training replicas on a tiny model, side by side in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from libra.exec.grpo import Denominator
from libra.exec.messages import Regroup, Sample, StartTrainer, Train
from libra.exec.pace import Pacer
from libra.exec.trainer import Trainer
from libra.exec.weights import create_buffer

R = TypeVar("R")

TOKENS = 14  # ids that samples are made of, after the special ones
RATE = 1e-3


def make_trainer(model: Path, kind: Denominator = "tokens", seed: int = 0, micro_batch: int = 1) -> Trainer:
    """A replica. `micro_batch` 1 gives every sample its own, so that a batch may be split anywhere without changing the
    rounding of bfloat16."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    start = StartTrainer(str(model), 0, RATE, (0.8, 1.28), kind, 12.0, micro_batch, seed, 1.0, cores)
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


def order(samples: list[Sample], version: int = 1, publish_to: int = -1) -> Train:
    """A step over `samples`, which are all that this replica has."""
    return Train(version, samples, len(samples), sum(sum(s.generated) for s in samples), publish_to)


def parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in trainer._named_parameters().values()])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def at_once(*verbs: Callable[[], R]) -> list[R]:
    """Run collectives of several replicas at the same time."""
    with ThreadPoolExecutor(len(verbs)) as threads:
        return [future.result(timeout=60) for future in [threads.submit(verb) for verb in verbs]]


def regroup(replicas: list[Trainer], generation: int, port: int, share_state: bool = False) -> None:
    def enter(rank: int) -> Callable[[], float]:
        return lambda: replicas[rank].regroup(Regroup(generation, rank, len(replicas), port, share_state))

    at_once(*(enter(rank) for rank in range(len(replicas))))
