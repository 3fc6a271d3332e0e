"""The training side as one unit: replicas that share each step.

Invariant: a step is made by all present replicas together or not at all. When one is lost in the middle, nobody has
stepped; the rest regroup and make the same step from the same samples, so nothing is trained twice or dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from libra.exec.handles import Handle, WorkerFailedError, WorkerLostError
from libra.exec.messages import Regroup, Regrouped, Sample, Train, Trained
from libra.exec.weights import BUFFERS


class CoreLostError(RuntimeError):
    """The core trainer is gone; the run can only go on from its last checkpoint."""


class DivergedError(RuntimeError):
    """Replicas that must be equal are not."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimiser step over all replicas. Seconds are those of the slowest replica unless said otherwise."""

    version: int
    checksum: int
    buffer: int
    replicas: int
    wall_seconds: float  # as the controller saw it
    compute_seconds: float
    exchange_seconds: float
    publish_seconds: float
    forward_tokens: int
    generated_tokens: int
    clip_share: float
    behaviour_weight_mean: float
    prox_gap_mean: float
    gradient_norm: float


class Trainers:
    """Core replica first. Verbs that change the membership hold `boundary`, so that they fall between two steps."""

    def __init__(self, core: Handle, find_port: Callable[[], int]) -> None:
        self._replicas: list[Handle] = [core]
        self._find_port = find_port
        self._port = 0
        self._generation = 0
        self.boundary = asyncio.Lock()

    @property
    def core(self) -> Handle:
        return self._replicas[0]

    @property
    def size(self) -> int:
        return len(self._replicas)

    def replicas(self) -> tuple[Handle, ...]:
        return tuple(self._replicas)

    def names(self) -> tuple[str, ...]:
        return tuple(replica.name for replica in self._replicas)

    async def join(self, replica: Handle) -> float:
        """Take in a started replica at the next step boundary; it receives the core's state. Returns the seconds that
        training stood still."""
        async with self.boundary:
            began = time.monotonic()
            self._forget_lost()
            self._replicas.append(replica)
            await self._regroup(share_state=True)
            return time.monotonic() - began

    async def leave(self, name: str) -> Handle:
        """Let a replica go at the next step boundary."""
        async with self.boundary:
            if name == self.core.name:
                raise ValueError(f"worker {name} is the core trainer, which never leaves")
            self._forget_lost()
            leaving = next((replica for replica in self._replicas if replica.name == name), None)
            if leaving is None:
                raise WorkerLostError(f"replica {name} went away before it could leave")
            self._replicas.remove(leaving)
            await self._regroup(share_state=False)
            return leaving

    async def step(self, version: int, samples: list[Sample], sequences: int, tokens: int) -> StepResult:
        """Make weight version `version`. `sequences` and `tokens` describe the whole batch, for the denominator."""
        async with self.boundary:
            while True:
                try:
                    return await self._step(version, samples, sequences, tokens)
                except (WorkerLostError, WorkerFailedError) as error:
                    if isinstance(error, WorkerFailedError) and not _peer_lost(error):
                        raise
                    await asyncio.sleep(0)  # let the channel of the lost replica report its end
                    if self.core.lost:
                        raise CoreLostError(f"core trainer {self.core.name} is gone during step {version}") from None
                    survivors = [replica for replica in self._replicas if not replica.lost]
                    if len(survivors) == len(self._replicas):
                        raise
                    self._replicas = survivors
                    await self._regroup(share_state=True)  # one of them may have stepped before the loss was noticed

    async def _step(self, version: int, samples: list[Sample], sequences: int, tokens: int) -> StepResult:
        began = time.monotonic()
        buffer = version % BUFFERS
        shares = split_evenly(samples, self.size)
        orders = [
            # The denominator is a sum over replicas: one of them reports the whole batch.
            Train(
                version, share, sequences if rank == 0 else 0, tokens if rank == 0 else 0, buffer if rank == 0 else -1
            )
            for rank, share in enumerate(shares)
        ]
        answers = await asyncio.gather(
            *(replica.ask(order, Trained) for replica, order in zip(self._replicas, orders, strict=True)),
            return_exceptions=True,
        )
        if isinstance(answers[0], BaseException):
            raise answers[0]
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerLostError) and not _peer_lost(answer):
                raise answer
        # The core has stepped, with the gradients of all: the step is made, whoever was lost after the exchange.
        done = [answer for answer in answers if isinstance(answer, Trained)]
        if len(done) < len(answers):
            self._replicas = [replica for replica in self._replicas if not replica.lost]
            await self._regroup(share_state=True)
        if len({answer.parameter_hash for answer in done}) != 1:
            raise DivergedError(
                f"after step {version} the replicas {', '.join(self.names())} hold different parameters"
            )
        generated = sum(answer.generated_tokens for answer in done)
        return StepResult(
            version=version,
            checksum=done[0].checksum,
            buffer=buffer,
            replicas=len(done),
            wall_seconds=time.monotonic() - began,
            compute_seconds=max(answer.compute_seconds for answer in done),
            exchange_seconds=min(answer.exchange_seconds for answer in done),
            publish_seconds=done[0].publish_seconds,
            forward_tokens=sum(answer.forward_tokens for answer in done),
            generated_tokens=generated,
            clip_share=sum(answer.clipped for answer in done) / max(generated, 1),
            behaviour_weight_mean=sum(answer.behaviour_weight for answer in done) / generated if generated else 1.0,
            prox_gap_mean=sum(answer.prox_gap for answer in done) / max(generated, 1),
            gradient_norm=done[0].gradient_norm,
        )

    def _forget_lost(self) -> None:
        """Replicas that went away since the last step cannot enter a new membership. The core is not one of them: the
        next step says what its loss means."""
        self._replicas = [replica for replica in self._replicas if replica is self.core or not replica.lost]

    async def _regroup(self, share_state: bool) -> None:
        """Give every present replica its rank in a new membership."""
        self._generation += 1
        if self.size > 1 and self._port == 0:
            self._port = self._find_port()
        await asyncio.gather(
            *(
                replica.ask(Regroup(self._generation, rank, self.size, self._port, share_state), Regrouped)
                for rank, replica in enumerate(self._replicas)
            )
        )


def _peer_lost(error: BaseException) -> bool:
    return isinstance(error, WorkerFailedError) and error.peer_lost


def split_evenly(samples: list[Sample], parts: int) -> list[list[Sample]]:
    """Samples to replicas so that their tokens are nearly equal: longest first, each to the part with the fewest."""
    shares: list[list[Sample]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
        lightest = loads.index(min(loads))
        shares[lightest].append(sample)
        loads[lightest] += len(sample.tokens)
    return shares
