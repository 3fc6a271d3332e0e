"""Interfaces of a run to its trainer and its rollout engines, which `grpo` and `vllm` implement.

Invariant: each protocol has only the methods that a run calls. The backend decides how replicas share a step, and how
an engine batches. All times are in seconds.
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
    exchange_seconds: float  # includes the wait for the slowest replica


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimiser step over all replicas. Seconds are those of the slowest replica unless a comment says
    otherwise."""

    version: int
    checksum: int
    buffer: int
    replicas: int
    wall_seconds: float  # measured by the controller
    compute_seconds: float
    exchange_seconds: float
    publish_seconds: float  # to write the new weights for the engines
    forward_tokens: int
    generated_tokens: int
    clip_share: float
    behaviour_weight_mean: float
    prox_gap_mean: float
    gradient_norm: float
    held_seconds: float = 0.0  # before the step began, while another task held the step boundary
    redone_seconds: float = 0.0  # after that, for attempts that failed with a loss, and regrouping
    shares: tuple[Share, ...] = ()


class Trainer(Protocol):
    """The training side as one unit: replicas that share each step. Core replicas stay for the whole run, and hybrid
    replicas join and leave. Each method drops replicas that are lost meanwhile and continues without them. Every method
    that takes time raises `CoreLostError` if no core replica is left."""

    @property
    def boundary(self) -> asyncio.Lock:
        """Lock between two steps. While it is held, no step is made and no replica joins or leaves."""
        ...

    @property
    def publisher(self) -> Handle:
        """The replica on whose node the newest published weights are. It may be lost already."""
        ...

    @property
    def step_allowance(self) -> float:
        """Estimated seconds within which a step ends, or the loss of a replica is noticed."""
        ...

    def require_core(self) -> None:
        """Raise `CoreLostError` if no core replica is present."""
        ...

    def hybrids(self) -> tuple[str, ...]:
        """Names of the present replicas that may leave."""
        ...

    async def step(self, version: int, samples: list[Sample], sequences: int, tokens: int) -> StepResult:
        """Make weight version `version` from these samples, and publish it. Either all replicas make it, or none.

        `sequences` and `tokens` count the whole batch, for the denominator of the loss. They include trajectories
        without a signal, which are not among the samples. Raises `ExchangeError` if gradients cannot be reduced, and
        `DivergedError` if replicas have different parameters.
        """
        ...

    async def publish(self, version: int, buffer: int) -> int:
        """Write the current weights into buffer `buffer` again, as version `version`; returns their checksum."""
        ...

    async def join(self, replica: Handle, core: bool = False) -> float:
        """Admit a started replica, which contributes from the next step on; returns the seconds that a step waited for
        it. Raises `JoinError` if it cannot join, and `WorkerLostError` if it is lost; its process is then ended."""
        ...

    async def leave(self, name: str) -> Handle:
        """Release a hybrid replica at a step boundary; returns it, still running. Raises `WorkerLostError` if it is
        lost before."""
        ...

    async def measure(self, order: MeasureTraining) -> list[TrainingMeasured]:
        """Cost of training on every replica, measured at the same time while no step is made. Raises
        `ExchangeError`."""
        ...

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of every token after the first, under the current weights at the temperature of sampling. Raises
        `WorkerFailedError`."""
        ...

    async def save(self, directory: Path, optimiser: bool) -> None:
        """Write the weights in Hugging Face layout, with or without the optimiser's state. On failure, raises
        `DiskError` and leaves no partial file."""
        ...


class Engine(Protocol):
    """A rollout engine in its worker process. Methods that take time raise `WorkerLostError` if it is lost."""

    @property
    def name(self) -> str:
        """Name of its worker; the next engine in this worker has the same name."""
        ...

    @property
    def link(self) -> WorkerLink:
        """The engine's process and its node."""
        ...

    @property
    def lost(self) -> bool:
        """Whether the engine is lost, or was stopped."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights with which the engine generates; -1 before it has loaded any."""
        ...

    @property
    def lent(self) -> bool:
        """Whether its device also serves users, so that the engine computes only in the time they leave."""
        ...

    @property
    def away(self) -> str:
        """Reason why nothing is lent to it now; empty if it can serve."""
        ...

    @property
    def away_seconds(self) -> float:
        """Total seconds in which nothing was lent to it; 0 if its device is its own."""
        ...

    @property
    def loan(self) -> LoanState | None:
        """The loan, as of its last report; None if the device is its own, or before the first report."""
        ...

    @property
    def recall_rate(self) -> float:
        """Recalls of its device per second, since it started; 0 if the device is its own."""
        ...

    @property
    def work(self) -> LiveWork:
        """Its turns in flight, including those on their way to it."""
        ...

    @property
    def busy_seconds(self) -> float:
        """Seconds spent in iterations since the engine started. This counter and the four below are as of the engine's
        last report."""
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
        """Context tokens that it computed, rather than took from its prefix cache."""
        ...

    @property
    def finished_turns(self) -> int:
        """Turns that ended, including stopped ones."""
        ...

    async def generate(self, request: Generate, take: Callable[[Piece], None]) -> None:
        """Have a turn generated until it ends by itself or is interrupted. `take` is called with its tokens as they
        arrive, and with all of them before this method returns or raises."""
        ...

    def interrupt(self, turn: str) -> None:
        """Stop a turn now. Its `generate` returns once its last tokens have arrived."""
        ...

    def expecting(self, tokens: int) -> AbstractContextManager[None]:
        """Context that counts a request of `tokens` tokens, in flight to the engine, as part of its load."""
        ...

    def save(self, order: Save) -> asyncio.Future[Saved | None]:
        """Have KV saved for another engine. The result is None if this engine is lost first."""
        ...

    def fetched(self, transfer: int) -> asyncio.Future[Fetched | None]:
        """A future that is done when the KV of a transfer to this engine may be freed. The result is None if the engine
        is lost first."""
        ...

    async def load(self, order: LoadWeights) -> float:
        """Load new weights between two iterations; returns the seconds for which the engine paused."""
        ...

    async def ask(self, message: Message, reply: type[Reply], deadline: float = ANSWER_DEADLINE) -> Reply:
        """Send an order, and wait for its answer, `deadline` seconds at most. Raises `WorkerFailedError` if the engine
        reports a failure, and `TimeoutError`, after which the engine is lost."""
        ...

    def declare_lost(self, why: str) -> None:
        """Treat the engine as lost: all callers that wait for it get an error."""
        ...

    async def drained(self, deadline: float) -> bool:
        """Wait until no turn is running, `deadline` seconds at most. Returns False if turns still run then."""
        ...

    async def vacate(self, deadline: float) -> None:
        """Stop all turns now, so that other engines continue them. Wait until the KV that they need is saved,
        `deadline` seconds at most."""
        ...

    async def stop(self) -> None:
        """End the engine; no effect if it has ended already."""
        ...
