"""Interfaces of a run to its trainer and its rollout engines. `grpo` and `vllm` implement them.

Invariant: each protocol has only what a run calls. The backend decides how replicas share a step, or how an engine
batches. All times are seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from libra.backends.launch.handle import ANSWER_DEADLINE, Handle
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.engine_messages import Fetched, Generate, LoadWeights, LoanState, Piece, Save, Saved
from libra.backends.transport.messages import Message
from libra.backends.transport.trainer_messages import MeasureTraining, Sample, TrainingMeasured
from libra.live.work import LiveWork

Reply = TypeVar("Reply", bound=Message)


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part in a step."""

    replica: str
    compute_seconds: float
    exchange_seconds: float  # the wait for the slowest one included


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
    publish_seconds: float  # the new weights written for the engines
    forward_tokens: int
    generated_tokens: int
    clip_share: float
    behaviour_weight_mean: float
    prox_gap_mean: float
    gradient_norm: float
    held_seconds: float = 0.0  # before it began: another task held the step boundary
    redone_seconds: float = 0.0  # then: attempts that failed with a loss, and regrouping
    shares: tuple[Share, ...] = ()


class Trainer(Protocol):
    """The training side as one unit: replicas that share each step. Core replicas stay for the whole run, hybrid ones
    join and leave. A verb drops a replica that is lost meanwhile and continues without it. Every verb that takes time
    raises `CoreLostError` when no core replica is left."""

    @property
    def boundary(self) -> asyncio.Lock:
        """Lock between two steps: no step is made and no replica joins or leaves while it is held."""
        ...

    @property
    def publisher(self) -> Handle:
        """The replica on whose node the newest published weights are; it may be lost by now."""
        ...

    @property
    def step_allowance(self) -> float:
        """Estimated seconds within which a step is made, or the loss of a replica is noticed."""
        ...

    def require_core(self) -> None:
        """Raises `CoreLostError` when no core replica is present."""
        ...

    def hybrids(self) -> tuple[str, ...]:
        """Names of the present replicas that may leave."""
        ...

    async def step(self, version: int, samples: list[Sample], sequences: int, tokens: int) -> StepResult:
        """Make weight version `version` from these samples, and publish it. All replicas make it, or none.

        `sequences` and `tokens` describe the whole batch, for the denominator of the loss: trajectories without a
        signal are counted and not sent. Raises `ExchangeError` when gradients cannot be reduced, and `DivergedError`
        when replicas hold different parameters.
        """
        ...

    async def publish(self, version: int, buffer: int) -> int:
        """Write the current weights into that buffer again, as that version; returns their checksum."""
        ...

    async def join(self, replica: Handle, core: bool = False) -> float:
        """Admit a started replica, which contributes from the next step on; returns the seconds that a step waited for
        it. Raises `JoinError` when it cannot join, and `WorkerLostError` when it is lost; its process is then ended."""
        ...

    async def leave(self, name: str) -> Handle:
        """Release a hybrid replica at a step boundary; returns it, still running. Raises `WorkerLostError` when it is
        lost before."""
        ...

    async def measure(self, order: MeasureTraining) -> list[TrainingMeasured]:
        """Cost of training on every replica, timed together while no step is made. Raises `ExchangeError`."""
        ...

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs under the current weights at the temperature of sampling, for every token after the first.
        Raises `WorkerFailedError`."""
        ...

    async def save(self, directory: Path, optimiser: bool) -> None:
        """Write the weights in Hugging Face layout, with or without the state of the optimiser. Raises `DiskError`,
        without leaving part of a file."""
        ...


class Engine(Protocol):
    """A rollout engine in its worker process. Verbs that take time raise `WorkerLostError` when it is lost."""

    @property
    def name(self) -> str:
        """The worker that it runs in; the next engine there has the same name."""
        ...

    @property
    def link(self) -> WorkerLink:
        """The engine's process, and the node that it is on."""
        ...

    @property
    def lost(self) -> bool:
        """Whether the engine is lost, or was stopped."""
        ...

    @property
    def version(self) -> int:
        """The version of the weights that the engine generates with; -1 before it has loaded any."""
        ...

    @property
    def lent(self) -> bool:
        """Whether its device also serves users, and is available only in the time that they leave."""
        ...

    @property
    def away(self) -> str:
        """Reason why nothing is lent to it at present; empty: it serves."""
        ...

    @property
    def away_seconds(self) -> float:
        """Total seconds for which it was unavailable so far; 0 if its device is its own."""
        ...

    @property
    def loan(self) -> LoanState | None:
        """The loan, as of its last report; None: its device is its own, or there is no report yet."""
        ...

    @property
    def recall_rate(self) -> float:
        """Recalls of its device per second, since it started; 0 where the device is its own."""
        ...

    @property
    def work(self) -> LiveWork:
        """Its turns in flight, those on their way to it included."""
        ...

    @property
    def busy_seconds(self) -> float:
        """Seconds spent in iterations since it started, as of its last report, like the next four."""
        ...

    @property
    def iterations(self) -> int:
        """Iterations made."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens generated."""
        ...

    @property
    def prefilled_tokens(self) -> int:
        """Context tokens computed, not taken from its prefix cache."""
        ...

    @property
    def finished_turns(self) -> int:
        """Turns that ended, stopped ones included."""
        ...

    async def generate(self, request: Generate, take: Callable[[Piece], None]) -> None:
        """Have a turn generated until it stops by itself or is interrupted. `take` gets its tokens as they arrive, all
        of them before this returns or raises."""
        ...

    def interrupt(self, turn: str) -> None:
        """Stop a turn now; its `generate` returns once its last tokens have arrived."""
        ...

    def expecting(self, tokens: int) -> AbstractContextManager[None]:
        """Count a request of this size, in flight to the engine, as one that it holds."""
        ...

    def save(self, order: Save) -> asyncio.Future[Saved | None]:
        """Have KV saved for another engine; None if this one is lost first."""
        ...

    def fetched(self, transfer: int) -> asyncio.Future[Fetched | None]:
        """Done when the KV of a transfer, which a coming request uses, is no longer needed; None if the engine is lost
        first."""
        ...

    async def load(self, order: LoadWeights) -> float:
        """Take new weights between two iterations; returns the seconds that the engine paused for it."""
        ...

    async def ask(self, message: Message, reply: type[Reply], deadline: float = ANSWER_DEADLINE) -> Reply:
        """Give an order to measure, and wait for its answer, `deadline` seconds at most. Raises `WorkerFailedError`
        when the engine reports that it cannot, and `TimeoutError`, after which it is lost."""
        ...

    def declare_lost(self, why: str) -> None:
        """Treat the engine as lost: all its waiting callers fail."""
        ...

    async def drained(self, deadline: float) -> bool:
        """Wait until no turn is running; False when the deadline, in seconds, came first."""
        ...

    async def vacate(self, deadline: float) -> None:
        """Stop all turns now, for other engines to continue, and wait until the KV that they need is saved, `deadline`
        seconds at most."""
        ...

    async def stop(self) -> None:
        """End it; an engine that is already gone is stopped."""
        ...
