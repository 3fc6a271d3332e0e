"""Who takes part in training, and in which numbered generation of the gradient exchange.

Invariant: a generation has a fixed list of replicas, one number that is never used again, and is prepared before it is
entered. Replicas enter one only between two steps, all of them, or move on to the next one that is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from libra.backends.launch.answers import Patience, ask_all
from libra.backends.launch.handles import ANSWER_DEADLINE, Handle, WorkerLostError
from libra.backends.transport.messages import (
    FORMING_SECONDS,
    Done,
    Enter,
    Entered,
    HostRendezvous,
    Message,
    Prepare,
    Rendezvous,
)

FAILURES = 3  # in a row although no replica is lost, before it is an error

Reply = TypeVar("Reply", bound=Message)


class CoreLostError(RuntimeError):
    """No core trainer is left; the run can only go on from its last checkpoint."""


class ExchangeError(RuntimeError):
    """Replicas that are all there do not get their gradients added up."""


class Membership:
    """The present replicas, core ones first: the order is that of their ranks."""

    def __init__(self, core: Handle, kill: Callable[[Handle], None], patience: Patience, port: int) -> None:
        self._kill = kill
        self._wanted_port = port
        self._meeting: tuple[Handle, int] | None = None  # the replica where they meet, and the port
        self.patience = patience
        self.cores, self.hybrids = [core], list[Handle]()
        self.prepared = 0  # the newest generation

    @property
    def replicas(self) -> tuple[Handle, ...]:
        return (*self.cores, *self.hybrids)

    def require_core(self) -> Handle:
        """The first core replica that is not lost. Raises `CoreLostError` when all are."""
        for replica in self.cores:
            if not replica.lost:
                return replica
        names = ", ".join(replica.name for replica in self.cores)
        raise CoreLostError(f"core trainer {names} is gone, and no other is left")

    def hybrid(self, name: str) -> Handle:
        """Raises `WorkerLostError` when there is none of that name."""
        for replica in self.hybrids:
            if replica.name == name:
                return replica
        raise WorkerLostError(f"worker {name} is no training replica, or no more")

    async def ask(
        self,
        orders: Sequence[tuple[Handle, Message]],
        reply: type[Reply],
        allowed: Callable[[float], float] | None = None,
        deadline: float = ANSWER_DEADLINE,
    ) -> list[Reply | None]:
        """See `ask_all`. `allowed` is by default what suits equal work."""
        return await ask_all(orders, reply, allowed or self.patience.beside, self._kill, deadline)

    async def prepare(self, replicas: Sequence[Handle]) -> int:
        """Let these replicas form a generation beside the present one; returns its number. They answer at once, and who
        is lost meanwhile is found when the generation is entered."""
        self.prepared += 1
        first, size = replicas[0], len(replicas)
        port = await self._meet_at(first) if size > 1 else 0
        orders = [
            (replica, Prepare(self.prepared, rank, size, replica.host, first.host, port))
            for rank, replica in enumerate(replicas)
        ]
        await self.ask(orders, Done, deadline=self.patience.floor)
        return self.prepared

    async def _meet_at(self, replica: Handle) -> int:
        """The port at which it listens for the others; 0 when it cannot, or is lost."""
        if self._meeting is None or self._meeting[0] is not replica:
            order = HostRendezvous(replica.host, self._wanted_port)
            [meeting] = await self.ask([(replica, order)], Rendezvous, deadline=self.patience.floor)
            if meeting is None or not meeting.port:
                return 0
            self._meeting = replica, meeting.port
        return self._meeting[1]

    async def enter(self, generation: int) -> None:
        """All present replicas enter; into a newer generation when that does not come about or somebody is lost on the
        way. Raises `CoreLostError`, `ExchangeError`."""
        failures = 0
        while True:
            orders = [(replica, Enter(generation)) for replica in self.replicas]
            # One that fails at once has told nothing of how long the others may wait for each other.
            answers = await self.ask(orders, Entered, lambda elapsed: FORMING_SECONDS + self.patience.beside(elapsed))
            why = next((answer.failure for answer in answers if answer is not None and answer.failure), "")
            somebody_lost = self.forget_lost()
            if not why and not somebody_lost:
                return
            failures += not somebody_lost
            if failures == FAILURES:
                names = ", ".join(replica.name for replica in self.replicas)
                raise ExchangeError(f"replicas {names} do not find each other: {why}")
            generation = await self.prepare(self.replicas)

    async def regroup(self) -> None:
        """A new generation of those who are present."""
        await self.enter(await self.prepare(self.replicas))

    async def tidy(self) -> None:
        """Go on without those that were lost since the last step."""
        if self.forget_lost():
            await self.regroup()

    def forget_lost(self) -> bool:
        """Whether somebody was lost. Raises `CoreLostError` when no core is left."""
        before, first = len(self.replicas), self.require_core()
        self.cores = [first, *(replica for replica in self.cores if replica is not first and not replica.lost)]
        self.hybrids = [replica for replica in self.hybrids if not replica.lost]
        return len(self.replicas) < before
