"""The replicas that take part in training, and their numbered generations of the gradient exchange.

Invariant: a generation has a fixed list of replicas and a number that is never reused. It is prepared before it is
entered, and replicas enter it only between two steps. If one of them cannot enter, all go to the next prepared
generation.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from libra.backends.grpo.joint_step import first_failure
from libra.backends.launch.handle import ANSWER_DEADLINE, SILENT_LOOKS, Handle
from libra.backends.transport.messages import Acknowledged, Message
from libra.backends.transport.trainer_messages import (
    FORMING_SECONDS,
    Enter,
    Entered,
    HostRendezvous,
    Prepare,
    Reduced,
    Rendezvous,
    TrainingMeasured,
)
from libra.exec.protocols import WorkerFailedError, WorkerLostError

Reply = TypeVar("Reply", bound=Message)
_LOST = (WorkerLostError, WorkerFailedError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits after which a replica counts as lost. Replicas have nearly equal work. So a replica hangs if it needs
    more than `factor` times as long as another, plus `floor` seconds. A loaded operating system may delay a healthy
    process by `floor`. Too short limits lose a healthy replica; too long limits only prolong the wait for a broken
    one."""

    factor: float = 4.0
    floor: float = 10.0  # seconds
    unknown: float = 60.0  # seconds for a first step, whose duration is unknown
    grace: float = 2.0  # seconds between answers that should come at the same time

    def beside(self, seconds: float) -> float:
        """Seconds allowed for work that another replica did in `seconds`."""
        return self.factor * seconds + self.floor


STANDARD = Patience()


class Boundary(asyncio.Lock):
    """Lock between two steps. While a task holds it, no other task makes a step or changes the membership.

    Holding it counts as waiting only while a step is due.
    """

    def __init__(self) -> None:
        super().__init__()
        self._due: float | None = None  # time from which a step has waited for it

    @asynccontextmanager
    async def step(self) -> AsyncIterator[float]:
        """Context that holds the boundary for a step; yields the seconds that the step waited for it."""
        asked = self._due = time.monotonic()
        try:
            await self.acquire()
        finally:
            self._due = None
        try:
            yield time.monotonic() - asked
        finally:
            self.release()

    def waited(self, since: float) -> float:
        """Seconds that a step has waited for the boundary after the time `since`."""
        return 0.0 if self._due is None else time.monotonic() - max(since, self._due)


FAILURES = 3  # attempts in sequence that may fail without a lost replica before an error is raised


class CoreLostError(RuntimeError):
    """No core trainer is left; the run can only resume from its last checkpoint."""


class ExchangeError(RuntimeError):
    """Replicas cannot reduce their gradients although all are present."""


class Membership:
    """The present replicas in the order of their ranks, core replicas first."""

    def __init__(self, core: Handle, kill: Callable[[Handle], None], patience: Patience, port: int) -> None:
        self._kill = kill
        self._wanted_port, self._token = port, secrets.token_hex(32)
        self._rendezvous: tuple[Handle, int] | None = None  # the replica at which the others meet, and its port
        self.patience = patience
        self.cores, self.hybrids = [core], list[Handle]()
        self.prepared = 0  # the newest generation

    @property
    def replicas(self) -> tuple[Handle, ...]:
        return (*self.cores, *self.hybrids)

    def require_core(self) -> Handle:
        """The first core replica that is not lost. Raises `CoreLostError` if all are lost."""
        for replica in self.cores:
            if not replica.lost:
                return replica
        names = ", ".join(replica.name for replica in self.cores)
        raise CoreLostError(f"core trainer {names} is gone, and none is left")

    def hybrid(self, name: str) -> Handle:
        """The hybrid replica with this name. Raises `WorkerLostError` if there is none."""
        for replica in self.hybrids:
            if replica.name == name:
                return replica
        raise WorkerLostError(f"worker {name} is not a training replica at present")

    async def ask(
        self,
        orders: Sequence[tuple[Handle, Message]],
        reply: type[Reply],
        allowed: Callable[[float], float] | None = None,
        deadline: float = ANSWER_DEADLINE,
    ) -> list[Reply | None]:
        """Send the orders; returns the answers in the same order, with None for a lost replica.

        `deadline` is the time limit for the first answer. `allowed` computes the limit for all answers from the seconds
        of the first; the default is for equal work. A replica that takes longer, or fails, is declared lost and killed.
        """
        allowed = allowed or self.patience.beside
        began = time.monotonic()
        look, looks = None, SILENT_LOOKS
        tasks = {asyncio.create_task(replica.ask(order, reply, deadline)): replica for replica, order in orders}
        try:
            waiting = set(tasks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=look, return_when=asyncio.FIRST_COMPLETED)
                if look is None and any(not isinstance(task.exception(), _LOST) for task in done):
                    elapsed = time.monotonic() - began
                    look = max(0.0, allowed(elapsed) - elapsed) / SILENT_LOOKS
                elif not done:
                    looks -= 1
                if not looks:
                    for task in waiting:
                        self._give_up(tasks[task], "it did not answer while the others did")
                    look, looks = None, SILENT_LOOKS
            return [self._answer(task, replica) for task, replica in tasks.items()]
        finally:
            for task in tasks:
                task.cancel()

    def _answer(self, task: asyncio.Task[Reply], replica: Handle) -> Reply | None:
        match task.exception():
            case None:
                return task.result()
            case WorkerLostError():
                pass
            case TimeoutError():  # the handle has declared the replica lost
                self._kill(replica)
            case WorkerFailedError() as error:
                self._give_up(replica, str(error))
            case error:
                raise error
        return None

    def _give_up(self, replica: Handle, why: str) -> None:
        replica.declare_lost(why)
        self._kill(replica)

    async def prepare(self, replicas: Sequence[Handle]) -> int:
        """Have these replicas form a generation while the current one continues; returns its number. They answer at
        once. If one is lost, `enter` notices it."""
        self.prepared += 1
        first, size = replicas[0], len(replicas)
        port = await self._meet_at(first) if size > 1 else 0
        orders = [
            (replica, Prepare(self.prepared, rank, size, replica.host, first.host, port, self._token))
            for rank, replica in enumerate(replicas)
        ]
        await self.ask(orders, Acknowledged, deadline=self.patience.floor)
        return self.prepared

    async def _meet_at(self, replica: Handle) -> int:
        """The port at which this replica listens for the others; 0 if it cannot listen, or is lost."""
        if self._rendezvous is None or self._rendezvous[0] is not replica:
            order = HostRendezvous(replica.host, self._wanted_port, self._token)
            [meeting] = await self.ask([(replica, order)], Rendezvous, deadline=self.patience.floor)
            if meeting is None or not meeting.port:
                return 0
            self._rendezvous = replica, meeting.port
        return self._rendezvous[1]

    async def enter(self, generation: int) -> None:
        """Have all present replicas enter the generation. If it is not formed, or a replica is lost meanwhile, they
        enter a newer one. Raises `CoreLostError`, `ExchangeError`."""
        failures = 0
        while True:
            orders = [(replica, Enter(generation)) for replica in self.replicas]
            # A replica that fails at once does not show how long the others may wait for each other.
            answers = await self.ask(orders, Entered, lambda elapsed: FORMING_SECONDS + self.patience.beside(elapsed))
            why = first_failure(answers)
            somebody_lost = self.forget_lost()
            if not why and not somebody_lost:
                return
            failures += not somebody_lost
            if failures == FAILURES:
                names = ", ".join(replica.name for replica in self.replicas)
                raise ExchangeError(f"replicas {names} do not find each other: {why}")
            generation = await self.prepare(self.replicas)

    async def regroup_after(
        self, what: str, answers: Sequence[Reduced | TrainingMeasured | None], failures: int
    ) -> int:
        """Enter a new generation after a failed attempt; returns the number of failed attempts without a lost replica,
        including this one. Raises `CoreLostError`, `ExchangeError`."""
        failures += not self.forget_lost()
        await self.regroup()
        if failures == FAILURES:
            why = first_failure(answers)
            raise ExchangeError(f"{what} failed {failures} times although no replica is lost: {why}")
        return failures

    async def regroup(self) -> None:
        """Have the present replicas enter a new generation."""
        await self.enter(await self.prepare(self.replicas))

    async def tidy(self) -> None:
        """Continue without replicas that were lost since the last step."""
        if self.forget_lost():
            await self.regroup()

    def forget_lost(self) -> bool:
        """Drop lost replicas; returns whether there were any. Raises `CoreLostError` if no core replica is left."""
        before, first = len(self.replicas), self.require_core()
        self.cores = [first, *(replica for replica in self.cores if replica is not first and not replica.lost)]
        self.hybrids = [replica for replica in self.hybrids if not replica.lost]
        return len(self.replicas) < before
