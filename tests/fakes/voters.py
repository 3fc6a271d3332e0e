"""Training replicas without a process at the far ends of real handles: they vote, step, die and hang as they are told.

Invariant: they check the protocol from their side. A replica steps only on a gradient that all replicas of its
generation have put their share into, and never forgets one without being told to.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from fakes.far_end import FarEnd, connect
from msgspec.structs import replace

from libra.backends.launch.handle import Handle
from libra.backends.transport.messages import Acknowledged, Failure, Message, Stop
from libra.backends.transport.trainer_messages import (
    CatchUp,
    Commit,
    Discard,
    Enter,
    Entered,
    Follow,
    HostRendezvous,
    Identify,
    MeasureTraining,
    Prepare,
    Publish,
    Published,
    Reduced,
    RelayPlace,
    Rendezvous,
    Serve,
    Serving,
    StateDigest,
    StatePlace,
    TokenSums,
    Train,
    Trained,
    TrainingMeasured,
)

TOKEN = "drawn"
PORT = 29500  # where the replicas meet
RELAYS = 40000  # the port of the first replica's relay

Fate = Literal["ok", "die", "hang", "fail", "break", "late", "unsure"]
"""Of one order: done; the process is killed; it stops; the exchange fails though nobody is lost; the worker reports a
failure of its own. Of a vote also: it is killed when it has put its gradient in; all but this one get the sum."""


@dataclass
class Round:
    """One exchange of one generation: complete once all its replicas have put their gradient in."""

    size: int
    shares: dict[str, list[str]] = field(default_factory=dict)  # ids of samples
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failed: bool = False

    def give(self, replica: str, share: list[str]) -> None:
        self.shares[replica] = share
        if len(self.shares) == self.size:
            self.ended.set()

    def fail(self) -> None:
        if not self.ended.is_set():
            self.failed = True
            self.ended.set()


class Floor:
    """Where the replicas meet. `rounds` by generation and version; `committed`: the generations that made a version."""

    def __init__(self) -> None:
        self.replicas: dict[str, Voter] = {}
        self.rounds: dict[tuple[int, int], Round] = {}
        self.committed: dict[int, set[int]] = {}

    async def hire(self, name: str, node: str = "local", host: str = "127.0.0.1") -> Voter:
        handle, far = await connect(Handle, lambda name, why: None, name)
        handle.node, handle.host = node, host
        voter = self.replicas[name] = Voter(self, len(self.replicas), handle, far)
        return voter

    def kill(self, handle: Handle) -> None:
        self.replicas[handle.name].killed = True
        self.replicas[handle.name].fall()

    async def close(self) -> None:
        for voter in self.replicas.values():
            voter.free.set()
            if not voter.fallen:
                await voter.handle.stop()
            voter.fall()
            voter.handle.close()
        await asyncio.gather(*(voter.life for voter in self.replicas.values()))


class Voter:
    def __init__(self, floor: Floor, index: int, handle: Handle, far: FarEnd) -> None:
        self.name, self.handle = handle.name, handle
        self.orders: list[Message] = []
        self.fates: dict[type[Message], deque[Fate]] = {}
        self.diverged = ""  # as its steps say
        self.steps: list[int] = []  # versions
        self.generation = 0
        self.unformed: set[int] = set()  # generations that do not come about
        self.late = 0  # times that it is not level yet when asked
        self.behind: deque[str] = deque()  # answers to Follow
        self.busy_seconds = 0.0  # until it looks at an order to catch up
        self.free = asyncio.Event()  # it is in the middle of no copy; else it does nothing that is asked of it
        self.free.set()
        self.killed = self.fallen = False
        self._floor, self._index, self._far = floor, index, far
        self._prepared: dict[int, int] = {}  # generation to size
        self._size = 1
        self._pending: tuple[int, int] | None = None  # generation and version of a gradient that awaits its verdict
        self.life = asyncio.create_task(self._live())

    def told(self, kind: type[Message]) -> list[Message]:
        """The orders of a kind; tokens, which are drawn, are left out."""
        return [
            replace(order, token=TOKEN) if isinstance(order, (Prepare, HostRendezvous)) else order
            for order in self.orders
            if isinstance(order, kind)
        ]

    def will(self, kind: type[Message], fates: Iterable[Fate]) -> None:
        """Fates of the next orders of a kind; after them all is well."""
        self.fates[kind] = deque(fates)

    def fall(self) -> None:
        """The process is gone."""
        self.fallen = True
        self.free.set()
        self._far.close()
        for (generation, _), round in self._floor.rounds.items():
            if generation == self.generation and self.name not in round.shares:
                round.fail()

    async def _live(self) -> None:
        while not self.fallen:
            try:
                order = await self._far.receive()
            except (OSError, ValueError):  # the other end is closed, or this one
                return
            self.orders.append(order)
            await self.free.wait()
            if self.fallen:
                return
            waiting = self.fates.get(type(order))
            fate = waiting.popleft() if waiting else "ok"
            if fate == "hang":
                return  # its connections stay open
            if fate == "die":
                self.fall()
                return
            if fate == "break":  # its last words
                self._far.send(Failure("broken"))
                self.fall()
                return
            answer = await self._answer(order, fate)
            if self.fallen:
                return
            self._far.send(answer)
            self.fallen = isinstance(order, Stop)

    async def _answer(self, order: Message, fate: Fate) -> Message:
        match order:
            case Train():
                return await self._vote(order, fate)
            case Commit():
                return self._step(order, fate)
            case Discard():
                self._pending = None
                return Acknowledged()
            case Prepare():
                self._prepared[order.generation] = order.size
                return Acknowledged()
            case HostRendezvous():
                return Rendezvous(0 if fate == "fail" else order.port or PORT)
            case Enter():
                assert self._pending is None, "the membership changes in the middle of a step"
                self.generation, self._size = order.generation, self._prepared[order.generation]
                return Entered(order.generation, "not everyone came" if fate == "fail" else "")
            case Identify():
                return self._standing(True)
            case Serve():
                return Serving([], "no such address") if fate == "fail" else Serving([RELAYS + self._index], "")
            case Follow():
                behind = self.behind.popleft() if self.behind else ""
                [place] = order.places
                assert isinstance(place, RelayPlace) == self._is_elsewhere(place)
                self._copy(place)
                return self._standing(False, behind)
            case CatchUp():
                await asyncio.sleep(self.busy_seconds)
                if self.late > 0:
                    self.late -= 1
                else:
                    self._copy(StatePlace(self._follows, 0))
                return self._standing(order.generation in self._prepared and order.generation not in self.unformed)
            case MeasureTraining():
                members = [voter for voter in self._floor.replicas.values() if voter.generation == self.generation]
                lost = fate == "fail" or len([voter for voter in members if not voter.fallen]) < self._size
                return TrainingMeasured([], 0.0, 0.0, "lost" if lost else "")
            case Publish():
                return Published(order.version, 1000 + order.version)
            case Stop():
                return Acknowledged()
            case _:
                raise AssertionError(f"{order} is not for a replica")

    async def _vote(self, order: Train, fate: Fate) -> Reduced:
        assert self._pending is None, "a gradient still awaits its verdict"
        key = self.generation, order.version
        assert key not in self._floor.rounds or self.name not in self._floor.rounds[key].shares
        round = self._floor.rounds.setdefault(key, Round(self._size))
        members = [voter for voter in self._floor.replicas.values() if voter.generation == self.generation]
        if fate == "fail" or any(voter.fallen and voter.name not in round.shares for voter in members):
            round.fail()
        else:
            round.give(self.name, [sample.id for sample in order.samples])
        await round.ended.wait()
        if fate == "late":
            self.fall()
        failed = round.failed or fate == "unsure"
        if not failed:
            self._pending = key
        tokens = sum(sum(sample.generated) for sample in order.samples)
        sums = TokenSums(2 * tokens, tokens, 1.0, 1.5, 0.5)
        return Reduced(order.version, "lost" if failed else "", 0.5, 0.1, sums)

    def _step(self, order: Commit, fate: Fate) -> Trained:
        assert self._pending is not None and self._pending[1] == order.version, "a step without a summed gradient"
        self._floor.committed.setdefault(order.version, set()).add(self._pending[0])
        self._pending = None
        self.steps.append(order.version)
        hash = self._hash() + (fate == "fail")
        return Trained(order.version, 99 if order.publish_to >= 0 else 0, hash, 0.125, 3.0, self.diverged)

    def _source(self, place: StatePlace | RelayPlace) -> Voter:
        index = place.port - RELAYS if isinstance(place, RelayPlace) else place.pid
        [source] = [voter for voter in self._floor.replicas.values() if voter._index == index]
        return source

    def _is_elsewhere(self, place: StatePlace | RelayPlace) -> bool:
        return self._source(place).handle.node != self.handle.node

    def _copy(self, place: StatePlace | RelayPlace) -> None:
        source = self._source(place)
        self._follows = source._index
        self.steps = list(source.steps)

    def _standing(self, ready: bool, behind: str = "") -> StateDigest:
        number = -1 if behind else len(self.steps)
        return StateDigest(number, self._hash(), 64, [StatePlace(self._index, 0)], ready, behind)

    def _hash(self) -> int:
        return zlib.crc32(repr(self.steps).encode())
