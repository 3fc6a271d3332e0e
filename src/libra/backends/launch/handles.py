"""The controller's view of its workers: awaitable verbs over a channel.

Invariant: when a worker goes away, everything that waits for it fails at once with `WorkerLostError`; no caller waits
for ever and none is told success. What an engine reported of a turn was handed on as it came, and nothing comes after
the turn's end. A worker that says what nobody asked for is given up, and what comes from one that was is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import FromWorker
from libra.backends.transport.engine_messages import (
    EngineMeasured,
    Fetched,
    Generate,
    Generated,
    HandoverMeasured,
    Interrupt,
    Loaded,
    LoadWeights,
    MeasureEngine,
    MeasureHandover,
    Piece,
    Save,
    Saved,
    StartEngine,
)
from libra.backends.transport.messages import Acknowledged, Failure, Message, Ready, Stop
from libra.backends.transport.trainer_messages import StartTrainer
from libra.exec.background import raise_in_loop
from libra.exec.protocols import WorkerFailedError as WorkerFailedError
from libra.exec.protocols import WorkerLostError as WorkerLostError

START_DEADLINE = 120.0  # seconds from the order to readiness
ANSWER_DEADLINE = 300.0  # seconds for any other order

# A worker that owes an answer is looked at so many times. Looks are counted, not seconds: a controller that was held up
# itself (stopped, or waiting for a disk) looks less often, and finds the answer that came meanwhile.
SILENT_LOOKS = 20
# An engine with turns to make reports `report.REPORT_SECONDS` apart. Iterations take milliseconds, loading weights at
# most seconds; one that is silent at all looks, so far apart, hangs, or is too slow to wait for.
LOOK_SECONDS = 1.0

Reply = TypeVar("Reply", bound=Message)
Answer = TypeVar("Answer", Saved, Fetched)


class Handle:
    """Orders with one answer each, answered in turn; `on_lost` is called once when the worker goes away."""

    def __init__(self, link: WorkerLink, on_lost: Callable[[str, str], None]) -> None:
        self.name, self.link = link.name, link
        self.node, self.host = link.node, link.host
        self._channel = link.channel
        self._on_lost = on_lost
        # The orders that have no answer yet, oldest first. One whose asker was cancelled stays: its answer still comes.
        self._asked: deque[asyncio.Future[FromWorker | None]] = deque()
        self._order = asyncio.Lock()
        self.lost = False
        self._stopping = False  # its end is no loss
        self._reader = asyncio.create_task(self._read(), name=f"read {link.name}")
        self._reader.add_done_callback(raise_in_loop)

    async def ask(self, message: Message, reply: type[Reply], deadline: float = ANSWER_DEADLINE) -> Reply:
        """Send an order and wait for its answer. Raises `WorkerLostError`, `WorkerFailedError`, `TimeoutError`."""
        async with self._order:
            if self.lost:
                raise WorkerLostError(f"worker {self.name} is gone")
            asked: asyncio.Future[FromWorker | None] = asyncio.get_running_loop().create_future()
            self._asked.append(asked)
            self._channel.send(message)
            for _ in range(SILENT_LOOKS):
                await asyncio.wait([asked], timeout=deadline / SILENT_LOOKS)
                if asked.done():
                    break
            else:
                why = f"no answer to {type(message).__name__} in {deadline:.0f} s"
                self.declare_lost(why)
                raise TimeoutError(f"worker {self.name}: {why}")
            answer = asked.result()
        if answer is None:
            raise WorkerLostError(f"worker {self.name} went away during {type(message).__name__}")
        if isinstance(answer, Failure):
            raise WorkerFailedError(f"worker {self.name}: {answer.error}")
        if not isinstance(answer, reply):
            raise TypeError(f"worker {self.name} answered {type(message).__name__} with {type(answer).__name__}")
        return answer

    async def start(self, message: StartEngine | StartTrainer) -> Ready:
        return await self.ask(message, Ready, START_DEADLINE)

    async def stop(self) -> None:
        """End the worker; a worker that is already gone is stopped."""
        self._stopping = True
        try:
            await self.ask(Stop(), Acknowledged, 10.0)
        except (WorkerLostError, TimeoutError):
            pass
        self.close()

    def close(self) -> None:
        if not self.lost:
            self.lost = True
            self._fail_waiters()
        self._reader.cancel()
        self._channel.close()

    def _receive(self, message: FromWorker) -> None:
        if self._asked:
            asked = self._asked.popleft()
            if not asked.done():
                asked.set_result(message)
        elif isinstance(message, Failure):  # its last words
            self.declare_lost(f"it failed: {message.error}")
        else:
            self.declare_lost(f"it sent {type(message).__name__}, which nobody had asked for")

    def _fail_waiters(self) -> None:
        for asked in self._asked:
            if not asked.done():
                asked.set_result(None)

    async def _read(self) -> None:
        latest: FromWorker | None = None
        try:
            while not self.lost:  # what one that was given up still says is an answer to nobody
                latest = await self._channel.receive()
                self._receive(latest)
        except ConnectionError as error:
            # Who fails at an order says so and ends; whoever asked may not have heard of the one before the other.
            self.declare_lost(f"it failed: {latest.error}" if isinstance(latest, Failure) else str(error))
        except msgspec.MsgspecError as error:
            self.declare_lost(f"it sent what is not a message: {error}")

    def declare_lost(self, why: str) -> None:
        """Take the worker for gone; once, and not when it was told to stop."""
        if self.lost:
            return
        self.lost = True
        self._fail_waiters()
        self._channel.close()  # should the process still run, this ends it
        if not self._stopping:
            self._on_lost(self.name, why)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn that the engine has to make."""

    ended: asyncio.Future[None]
    take: Callable[[Piece], None]
    size: int  # tokens of its context


class EngineHandle(Handle):
    """A rollout engine: many generations at once, counters for the planner's feedback."""

    def __init__(self, link: WorkerLink, on_lost: Callable[[str, str], None]) -> None:
        self._turns: dict[str, _Turn] = {}
        self._saving: dict[int, asyncio.Future[Saved | None]] = {}  # by transfer
        self._fetching: dict[int, asyncio.Future[Fetched | None]] = {}
        self._reports = 0
        self.busy_seconds = 0.0
        self.prefilled_tokens = 0
        self.iterations = 0
        self.generated_tokens = 0
        self.finished_turns = 0
        self.version = -1
        self.load_tokens = 0  # context tokens of the requests it holds
        super().__init__(link, on_lost)
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {link.name}")
        self._watcher.add_done_callback(raise_in_loop)

    @property
    def running(self) -> int:
        return len(self._turns)

    async def generate(self, request: Generate, take: Callable[[Piece], None]) -> None:
        """Have a turn made until it stops: by itself, or as it is interrupted. `take` gets its tokens as they come.

        Raises `WorkerLostError` when the engine goes away first. Then, too, `take` has had all that there is of it.
        """
        if self.lost:
            raise WorkerLostError(f"engine {self.name} is gone")
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        size = len(request.tokens)
        self._turns[request.id] = _Turn(ended, take, size)
        self.load_tokens += size
        self._channel.send(request)
        try:
            await ended
        finally:
            del self._turns[request.id]
            self.load_tokens -= size
            if ended.cancelled():
                self.interrupt(request.id)

    def interrupt(self, turn: str) -> None:
        """Stop a turn where it is; `generate` returns once its last tokens have come."""
        if not self.lost:
            self._channel.send(Interrupt(turn))

    @contextmanager
    def expecting(self, tokens: int) -> Iterator[None]:
        """A request of this size is on its way to the engine: it counts as one that it holds."""
        self.load_tokens += tokens
        try:
            yield
        finally:
            self.load_tokens -= tokens

    def save(self, order: Save) -> asyncio.Future[Saved | None]:
        """Have KV put down for another engine; None when the engine goes away first."""
        saved = self._answer(self._saving, order.transfer.number)
        if not self.lost:
            self._channel.send(order)
        return saved

    def fetched(self, transfer: int) -> asyncio.Future[Fetched | None]:
        """When a transfer, that a request which is about to be sent comes with, is not needed any more; None when the
        engine goes away first."""
        return self._answer(self._fetching, transfer)

    async def vacate(self, deadline: float) -> None:
        """Stop all turns where they are, and wait until what they want of their KV is put down, `deadline` seconds at
        most. A turn asks for its KV before anybody else hears that it left."""
        for turn in self._turns:
            self.interrupt(turn)
        ends = time.monotonic() + deadline
        while (left := ends - time.monotonic()) > 0:
            waiting: list[asyncio.Future[Any]] = [turn.ended for turn in self._turns.values()]
            waiting += self._saving.values()
            if not waiting:
                return
            await asyncio.wait(waiting, timeout=left)

    async def measure_handover(self, order: MeasureHandover) -> HandoverMeasured:
        return await self.ask(order, HandoverMeasured)

    async def load(self, order: LoadWeights) -> float:
        """Take new weights between two iterations; returns the seconds the engine stood still for it."""
        try:
            loaded = await self.ask(order, Loaded, SILENT_LOOKS * LOOK_SECONDS)
        except TimeoutError:
            raise WorkerLostError(f"engine {self.name} took no weights in time") from None
        self.version = order.version
        return loaded.seconds

    async def measure(self, order: MeasureEngine) -> EngineMeasured:
        return await self.ask(order, EngineMeasured)

    async def drained(self, deadline: float) -> bool:
        """Wait until no turn is running; False when the deadline came first."""
        ends = time.monotonic() + deadline
        futures = [turn.ended for turn in self._turns.values()]
        if futures:
            await asyncio.wait(futures, timeout=ends - time.monotonic())
        return not any(not future.done() for future in futures)

    def _receive(self, message: FromWorker) -> None:
        self._reports += 1
        if isinstance(message, Saved):
            self._settle(self._saving, message)
            return
        if isinstance(message, Fetched):
            self._settle(self._fetching, message)
            return
        if not isinstance(message, Generated):
            super()._receive(message)
            return
        self.busy_seconds = message.busy_seconds
        self.prefilled_tokens = message.prefilled_tokens
        self.iterations = message.iterations
        self.generated_tokens = message.generated_tokens
        self.finished_turns += len(message.ended)
        for piece in message.pieces:
            turn = self._turns.get(piece.turn)
            if turn is not None:
                turn.take(piece)
        for id in message.ended:
            turn = self._turns.get(id)
            if turn is not None and not turn.ended.done():
                turn.ended.set_result(None)

    def _fail_waiters(self) -> None:
        super()._fail_waiters()
        for turn in self._turns.values():
            if not turn.ended.done():
                turn.ended.set_exception(WorkerLostError(f"engine {self.name} went away"))
        while self._saving:
            self._saving.popitem()[1].set_result(None)
        while self._fetching:
            self._fetching.popitem()[1].set_result(None)
        self._watcher.cancel()

    def _answer(
        self, answers: dict[int, asyncio.Future[Answer | None]], transfer: int
    ) -> asyncio.Future[Answer | None]:
        answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        if self.lost:
            answer.set_result(None)
        else:
            answers[transfer] = answer
        return answer

    def _settle(self, answers: dict[int, asyncio.Future[Answer | None]], message: Answer) -> None:
        answer = answers.pop(message.transfer, None)
        if answer is not None:
            answer.set_result(message)
        else:
            self.declare_lost(
                f"it sent {type(message).__name__} for transfer {message.transfer}, which it was not given"
            )

    async def _watch(self) -> None:
        """Take an engine for lost that has turns to make and does not go on with them."""
        silent = 0
        while silent < SILENT_LOOKS:
            reports, running = self._reports, self.running
            await asyncio.sleep(LOOK_SECONDS)
            silent = silent + 1 if running and self._reports == reports else 0
        self.declare_lost(
            f"it has {self.running} turns to make and said nothing for {SILENT_LOOKS * LOOK_SECONDS:.0f} s"
        )
