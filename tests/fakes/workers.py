"""Workers that answer from the test's own process, over real sockets and with real messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

from fakes.far_end import FarEnd

from libra.backends.devices import CPU, SlotDevice
from libra.backends.launch.launcher import SourceLostError, WorkerLink
from libra.backends.machine import Bf16Speed
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.engine_messages import (
    EngineMeasured,
    Generate,
    Generated,
    HandoverMeasured,
    Interrupt,
    Loaded,
    LoadWeights,
    MeasureEngine,
    MeasureHandover,
    Piece,
    Sleep,
    StartEngine,
    StartServer,
)
from libra.backends.transport.messages import Acknowledged, Message, Ready, Stop
from libra.backends.transport.trainer_messages import (
    CatchUp,
    Commit,
    Enter,
    Entered,
    Follow,
    HostRendezvous,
    Identify,
    LoadCheckpoint,
    MeasureTraining,
    Publish,
    Published,
    Reduced,
    Rendezvous,
    SaveCheckpoint,
    Score,
    Scored,
    StartTrainer,
    StateDigest,
    StatePlace,
    TokenSums,
    Train,
    Trained,
    TrainingMeasured,
    WarmedUp,
    WarmUp,
)

LOGPROB = -1.0  # of every token
NO_PROCESS = 1 << 23  # a process number that Linux gives to nobody

Speak = Callable[[list[int]], list[int]]
"""What an engine says to a context: the tokens of its turn."""


class MadeWorker:
    """Does at once what it is told, or what the test says instead: an answer, or None to go away."""

    def __init__(self, far: FarEnd, speak: Speak) -> None:
        self.far, self._speak = far, speak
        self.orders: list[Message] = []
        self.version = 0  # of an engine's weights, or of a replica's state, which is nothing else
        self._generated = self._iterations = 0
        self.instead: dict[type[Message], Message | Callable[[], Awaitable[Message]] | None] = {}
        self.gone = asyncio.Event()
        self._life = asyncio.create_task(self._live())

    def die(self) -> None:
        self.far.close()
        self._life.cancel()

    @property
    def loaded(self) -> list[int]:
        return [order.version for order in self.orders if isinstance(order, LoadWeights)]

    async def _live(self) -> None:
        try:
            while True:
                order = await self.far.receive()
                self.orders.append(order)
                if isinstance(order, Interrupt):
                    continue  # that turn has ended
                answer = await self._answer(order)
                if answer is None:
                    return
                self.far.send(answer)
                if isinstance(order, Stop):
                    return
        except (ConnectionError, OSError):
            pass
        finally:
            self.far.close()
            self.gone.set()

    async def _answer(self, order: Message) -> Message | None:
        if type(order) in self.instead:
            other = self.instead[type(order)]
            return await other() if callable(other) else other
        match order:
            case StartTrainer() | StartEngine() | StartServer():
                return Ready(0.1, (), 0)
            case Publish():
                return Published(order.version, 7)
            case HostRendezvous():
                return Rendezvous(4711)
            case Enter():
                return Entered(order.generation, "")
            case Identify() | Follow():
                return self._standing()
            case CatchUp():
                self.version = order.number
                return self._standing()
            case LoadWeights():
                self.version = order.version
                return Loaded(order.version, 0.25)
            case Generate():
                return self._turn(order)
            case Train():
                await asyncio.sleep(0.001)
                return self._vote(order)
            case Commit():
                return self._step(order)
            case Score():
                return Scored([[LOGPROB] * (len(tokens) - 1) for tokens in order.sequences])
            case MeasureEngine():
                return EngineMeasured([(n, n * context, 0.0, 1e-3 * n) for n, context in order.points])
            case MeasureHandover():
                return HandoverMeasured([(tokens, 1e-5 * tokens) for tokens in order.contexts] * order.repeats)
            case MeasureTraining():
                batches = [(sum(lengths), 1e-4 * sum(lengths)) for lengths in order.batches]
                return TrainingMeasured(batches * order.repeats, 1e-3, 1e-3)
            case WarmUp():
                return WarmedUp(0.5)
            case SaveCheckpoint():
                Path(order.directory).mkdir(parents=True, exist_ok=True)
                (Path(order.directory) / "model.safetensors").write_text(str(self.version))
                return Acknowledged()
            case LoadCheckpoint():
                self.version = int((Path(order.directory) / "model.safetensors").read_text())
                return Acknowledged()
            case _:
                return Acknowledged()

    def _turn(self, order: Generate) -> Generated:
        tokens = self._speak(order.tokens)
        self._generated, self._iterations = self._generated + len(tokens), self._iterations + len(tokens)
        piece = Piece(order.id, self.version, tokens, [LOGPROB] * len(tokens))
        busy = self._iterations / 1000
        return Generated([piece], [order.id], busy, self._generated, self._iterations, self._generated)

    def _standing(self) -> StateDigest:
        return StateDigest(self.version, self.version, 64, [StatePlace(0, 0)], ready=True)

    def _vote(self, order: Train) -> Reduced:
        assert order.version == self.version + 1
        tokens = sum(sum(sample.generated) for sample in order.samples)
        return Reduced(order.version, "", 0.001, 0.0, TokenSums(2 * tokens, tokens, 0.0, 1.0 * tokens))

    def _step(self, order: Commit) -> Trained:
        assert order.version == self.version + 1
        self.version = order.version
        return Trained(order.version, 7 if order.publish_to >= 0 else 0, order.version, 0.0, 1.0)


class MadeLauncher:
    """Starts workers without processes; `prepared` says what the next ones do."""

    hardware = "made"

    def __init__(self, speak: Speak = lambda tokens: []) -> None:
        self._speak = speak
        self.workers: dict[str, MadeWorker] = {}
        self.prepared: dict[str, dict[type[Message], Any]] = {}
        self.slots_changed: Callable[[], None] = lambda: None
        self._missing: set[int] = set()
        self.bf16: Sequence[Bf16Speed] = (Bf16Speed("", 16.0),)
        self.device = CPU  # of every slot
        self.without_weights = 0  # times that they are not where they should be
        self._by_link: dict[WorkerLink, MadeWorker] = {}

    @contextlib.asynccontextmanager
    async def open(
        self, logs: Path, devices: Sequence[SlotDevice] = (), places: Sequence[int] = ()
    ) -> AsyncIterator[Self]:
        """As the class is used by a run."""
        try:
            yield self
        finally:
            for worker in self.workers.values():
                worker.die()
            await asyncio.gather(*(worker.gone.wait() for worker in self.workers.values()))

    def processes(self) -> tuple[int, ...]:
        return ()

    def miss(self, *slots: int) -> None:
        """There are no nodes for these slots from now on, and for all others."""
        self._missing = set(slots)
        self.slots_changed()

    def offers(self, slot: int) -> bool:
        return slot not in self._missing

    async def ready(self) -> float:
        return 0.0

    async def spawn(self, name: str, slot: int) -> WorkerLink:
        before = self.workers.get(name)
        alone = before is None or before.gone.is_set() or isinstance(before.orders[-1], Sleep)
        assert alone, f"two processes in the slot of {name}"
        ours, theirs = socket.socketpair()
        worker = self.workers[name] = MadeWorker(FarEnd(theirs), self._speak)
        worker.instead = self.prepared.pop(name, {})
        link = WorkerLink(name, NO_PROCESS, await ControllerChannel.open(ours), (0, 1, 2), 0, device=self.device)
        self._by_link[link] = worker
        return link

    def kill(self, link: WorkerLink) -> None:
        self._by_link[link].die()

    async def gone(self, link: WorkerLink) -> None:
        await self._by_link[link].gone.wait()

    async def bring(self, weights: LoadWeights, size: int, source: WorkerLink, target: WorkerLink) -> None:
        if self.without_weights:
            self.without_weights -= 1
            raise SourceLostError(f"weights v{weights.version} are lost")

    def exists(self, link: WorkerLink) -> bool:
        return True
