"""The training side as one unit: replicas that share each step.

Invariant: a step is made by all present replicas together or not at all. Each replica votes when it has the summed
gradient, and gets the order to step only after all have voted. If a replica is lost before, none has stepped: the
others regroup and make the same step from the same samples. So no sample is trained twice or dropped, and no state is
copied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from libra.backends.devices import CPU
from libra.backends.grpo.joining import Joiner, JoinError, mirror_seconds
from libra.backends.grpo.joint_step import split_evenly, summarise, tokens_of
from libra.backends.grpo.membership import STANDARD, Boundary, Membership, Patience
from libra.backends.launch.handle import ANSWER_DEADLINE, Handle
from libra.backends.launch.launcher import WorkerLink
from libra.backends.protocols import Share, StepResult
from libra.backends.transport.messages import Acknowledged, Message, Precision
from libra.backends.transport.shared_memory import BUFFERS
from libra.backends.transport.trainer_messages import (
    Commit,
    Discard,
    MeasureTraining,
    Publish,
    Published,
    Reduced,
    Sample,
    SaveCheckpoint,
    Score,
    Scored,
    StartTrainer,
    Train,
    Trained,
    TrainingMeasured,
)
from libra.config.run import TrainingConfig
from libra.exec.protocols import WorkerFailedError, WorkerLostError
from libra.exec.ratio import Ratio
from libra.records.files import DiskError

Reply = TypeVar("Reply", bound=Message)
_FREE = 0.001  # seconds within which a free step boundary is entered


def start_order(
    model: Path,
    training: TrainingConfig,
    *,
    learning_rate: float,
    precision: Precision,
    seed: int,
    share: float,
    link: WorkerLink,
    cores: tuple[int, ...] | None = None,
    hashed: bool = False,
) -> StartTrainer:
    """The order to the worker at `link` to train this model. `share` is the share of the slot's core or of the GPU.
    `precision` is the run's number format. Without `cores`, the worker uses the cores of its slot. `hashed`: whether a
    GPU may seal weights with its own hash, which replaces the CRC of all bytes."""
    on_cpu = link.device == CPU
    return StartTrainer(
        model_directory=str(model),
        learning_rate=learning_rate,
        clip=training.clip,
        denominator=training.denominator,
        token_constant=training.token_constant,
        temperature=training.temperature,
        micro_batch_tokens=training.micro_batch_tokens,
        precision=precision,
        seed=seed,
        share=share if on_cpu else float(training.processes),
        cores=cores or link.own_cores,
        processes=training.processes,
        sharding=training.sharding,
        device=link.device.kind,
        memory=1.0 if on_cpu else min(1.0, share),
        hashed=hashed and not on_cpu,
    )


class DivergedError(RuntimeError):
    """Replicas differ although they must be equal, or their weights are not finite."""


def require_sound(what: str, rate: str, diverged: str) -> None:
    """Raise `DivergedError` if `diverged` is not empty. `rate` is the key of the learning rate to lower."""
    if diverged:
        raise DivergedError(f"{what} diverged: {diverged}; lower {rate}")


class Trainers:
    """The `Trainer` of a run. The first core replica publishes the weights."""

    def __init__(
        self,
        core: Handle,
        kill: Callable[[Handle], None],
        patience: Patience = STANDARD,
        port: int = 0,
    ) -> None:
        """`core` is the first replica; `kill` ends the process of a replica that hangs. Replicas meet at `port` of the
        first replica's node; 0 means any free port."""
        self._patience, self._kill = patience, kill
        self._members = Membership(core, kill, patience, port)
        self.publisher = core  # the replica on whose node the newest weights are; it may be lost already
        self._changing = asyncio.Lock()  # one replica joins or leaves at a time
        self._token_seconds = Ratio()  # of the slowest replica, per token of the largest share
        self._step_seconds = 0.0  # duration of the last step
        self._longest_step = 0.0  # duration of the longest step, in seconds
        self.boundary = Boundary()

    @property
    def core(self) -> Handle:
        """A present core replica. Raises `CoreLostError` if none is present."""
        return self._members.require_core()

    def require_core(self) -> None:
        """Raise `CoreLostError` if no core replica is present."""
        self._members.require_core()

    @property
    def size(self) -> int:
        return len(self._members.replicas)

    def replicas(self) -> tuple[Handle, ...]:
        return self._members.replicas

    def names(self) -> tuple[str, ...]:
        return tuple(replica.name for replica in self._members.replicas)

    def hybrids(self) -> tuple[str, ...]:
        """Names of the present replicas that may leave."""
        return tuple(replica.name for replica in self._members.hybrids if not replica.lost)

    @property
    def step_allowance(self) -> float:
        """Estimated seconds within which a step ends, or the loss of a replica is noticed."""
        return self._patience.beside(self._longest_step) if self._longest_step else self._patience.unknown

    async def join(self, replica: Handle, core: bool = False) -> float:
        """Admit a started replica while the others continue. The replica follows a core until it has the same state,
        and contributes from the next step on. Returns the seconds that a step waited for the replica to enter. Raises
        `JoinError` after declaring the replica lost, and `WorkerLostError` if the replica is lost."""
        async with self._changing:
            try:
                return await Joiner(replica, core, self._members, self.boundary, self._step_seconds).join()
            except JoinError as error:
                replica.declare_lost(str(error))
                self._kill(replica)
                raise

    async def leave(self, name: str) -> Handle:
        """Release a hybrid replica at a step boundary. Raises `WorkerLostError` if it is lost before."""
        members = self._members
        async with self._changing:
            if name in {replica.name for replica in members.cores}:
                raise ValueError(f"worker {name} is a core trainer, which never leaves")
            leaving = members.hybrid(name)
            async with self.boundary:
                await members.tidy()
                generation = await members.prepare([r for r in members.replicas if r is not leaving])
            async with self.boundary:
                await members.tidy()
                members.hybrids.remove(members.hybrid(name))
                if generation == members.prepared:
                    await members.enter(generation)
                else:  # a replica was lost, so the prepared generation is unusable
                    await members.regroup()
            return leaving

    async def ask_core(self, order: Message, reply: type[Reply]) -> Reply:
        """The answer of a core replica; if it is lost, that of the next core replica. Raises `CoreLostError`,
        `WorkerFailedError`.
        """
        while True:
            core = self.core
            try:
                return await core.ask(order, reply)
            except WorkerLostError:
                pass
            except TimeoutError:  # the handle has declared the core lost
                self._kill(core)

    async def publish(self, version: int, buffer: int) -> int:
        """Have a core replica publish its weights as version `version`; returns the checksum. Raises
        `CoreLostError`."""
        published = await self.ask_core(Publish(version, buffer), Published)
        self.publisher = self.core
        return published.checksum

    async def measure(self, order: MeasureTraining) -> list[TrainingMeasured]:
        """Cost of training on every replica, measured at the same time while no step is made. If a replica is lost, the
        others measure again. Raises `CoreLostError`, `ExchangeError`."""
        async with self._changing:
            await self._members.tidy()
            failures = 0
            while True:
                answers = await self._members.ask([(replica, order) for replica in self.replicas()], TrainingMeasured)
                measured = [answer for answer in answers if answer is not None and not answer.failure]
                if len(measured) == self.size:
                    return measured
                failures = await self._members.regroup_after("measuring", answers, failures)

    async def step(self, version: int, samples: list[Sample], sequences: int, tokens: int) -> StepResult:
        """Make weight version `version`. `sequences` and `tokens` count the whole batch, for the denominator.

        Raises `CoreLostError`, `ExchangeError`, `DivergedError`."""
        async with self.boundary.step() as held_seconds:
            entered, present = time.monotonic(), self.size
            await self._members.tidy()
            again = self.size < present
            failures = 0
            while True:
                began, names = time.monotonic(), self.names()
                votes = await self._vote(version, samples, sequences, tokens)
                complete = [vote for vote in votes if vote is not None and not vote.failure]
                if len(complete) == self.size:
                    return replace(
                        await self._commit(version, complete, began),
                        held_seconds=held_seconds if held_seconds > _FREE else 0.0,
                        redone_seconds=began - entered if again else 0.0,
                        shares=tuple(
                            Share(name, vote.compute_seconds, vote.exchange_seconds)
                            for name, vote in zip(names, complete, strict=True)
                        ),
                    )
                again = True
                await self._discard()
                failures = await self._members.regroup_after(f"step {version}", votes, failures)

    async def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs from a core replica. Raises `CoreLostError`, `WorkerFailedError`."""
        return (await self.ask_core(Score(sequences), Scored)).logprobs

    async def save(self, directory: Path, optimiser: bool) -> None:
        """Have a core replica write its state, in Hugging Face layout. On failure, raises `DiskError` and leaves no
        partial file."""
        try:
            await self.ask_core(SaveCheckpoint(str(directory.absolute()), optimiser), Acknowledged)
        except WorkerFailedError as error:  # the core is alive, but could not write
            for part in directory.glob("*.part"):
                part.unlink(missing_ok=True)  # frees its disk space for other files
            raise DiskError(directory, OSError(0, str(error))) from None

    async def _vote(self, version: int, samples: list[Sample], sequences: int, tokens: int) -> list[Reduced | None]:
        """Have every replica back-propagate its share and sum gradients; None for lost replicas."""
        shares = split_evenly(samples, self.size)
        allowed = self._patience.unknown
        if self._token_seconds.below:
            allowed = self._patience.beside(self._token_seconds.value * max(tokens_of(share) for share in shares))
        orders = [
            # The denominator is a sum over replicas, so one of them reports the whole batch.
            (replica, Train(version, share, sequences * (rank == 0), tokens * (rank == 0), allowed))
            for rank, (replica, share) in enumerate(zip(self.replicas(), shares, strict=True))
        ]
        grace = self._patience.grace
        return await self._members.ask(
            orders,
            Reduced,
            lambda elapsed: max(allowed, elapsed + grace),
            # All votes may be late: a share takes at most `allowed`, and the wait for a replica that hangs as long
            # again.
            max(ANSWER_DEADLINE, 2 * allowed + grace),
        )

    async def _discard(self) -> None:
        """Have all remaining replicas discard the gradient."""
        orders = [(replica, Discard()) for replica in self.replicas()]
        await self._members.ask(orders, Acknowledged, deadline=self._patience.floor)

    async def _commit(self, version: int, votes: list[Reduced], began: float) -> StepResult:
        """Have all replicas step. A later loss does not undo the step, since the sum already contains the gradient."""
        buffer = version % BUFFERS
        orders = [
            (replica, Commit(version, buffer if rank == 0 else -1)) for rank, replica in enumerate(self.replicas())
        ]
        copying = mirror_seconds(orders[0][0])  # for the core's copy while a replica joins
        answers = await self._members.ask(orders, Trained, lambda elapsed: self._patience.beside(elapsed) + copying)
        await self._members.tidy()
        done = [answer for answer in answers if answer is not None]
        diverged = next((answer.diverged for answer in done if answer.diverged), "")
        require_sound(f"step {version}", "training.learning_rate", diverged)
        if len({answer.parameter_hash for answer in done}) != 1:
            raise DivergedError(
                f"after step {version} the replicas {', '.join(self.names())} have different parameters"
            )
        if answers[0] is not None:
            checksum, publish_seconds = answers[0].checksum, answers[0].publish_seconds
            self.publisher = orders[0][0]
        else:  # the replica that should have published is lost
            asked = time.monotonic()
            checksum = await self.publish(version, buffer)
            publish_seconds = time.monotonic() - asked
        largest = max(vote.sums.forward_tokens for vote in votes)
        if largest:
            self._token_seconds.observe(max(vote.compute_seconds for vote in votes), largest)
        self._step_seconds = time.monotonic() - began
        self._longest_step = max(self._longest_step, self._step_seconds)
        return summarise(votes, done[0], checksum, buffer, self._step_seconds, publish_seconds)
