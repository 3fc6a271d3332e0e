"""The controller's view of a rollout engine: turns, KV for other engines, weights, and liveness.

Invariant: reports of a turn are passed on in the order of arrival, and nothing follows the turn's end. When the engine
is lost, all its turns fail at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from libra.backends.launch.handle import SILENT_LOOKS, Handle
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import FromWorker
from libra.backends.transport.engine_messages import (
    Fetched,
    Generate,
    Generated,
    Interrupt,
    Lent,
    Loaded,
    LoadWeights,
    LoanState,
    Piece,
    Save,
    Saved,
)
from libra.exec.background import background
from libra.exec.protocols import WorkerLostError
from libra.live.pace import Pace
from libra.live.work import LiveWork

# An engine with turns in progress reports every `report.REPORT_SECONDS`. Iterations take milliseconds, and loading
# weights takes seconds at most. So an engine that is silent at `SILENT_LOOKS` checks in sequence hangs, or is too slow.
LOOK_SECONDS = 1.0

Answer = TypeVar("Answer", Saved, Fetched)


@dataclass(slots=True)
class _Turn:
    """A turn in progress."""

    ended: asyncio.Future[None]
    take: Callable[[Piece], None]
    size: int  # tokens of its context
    generated: int = 0  # tokens reported up to now


class EngineHandle(Handle):
    """A rollout engine, with many turns at a time and counters for the planner."""

    def __init__(
        self,
        link: WorkerLink,
        on_lost: Callable[[str, str], None],
        on_recall: Callable[[EngineHandle], None] | None = None,
        on_load: Callable[[EngineHandle, float], None] | None = None,
    ) -> None:
        """`on_recall` is called when the engine's device is recalled, and when it is lent again; None: the device is
        the engine's own. `on_load` is called when the engine has loaded weights by itself, with the seconds of the
        pause; None: callers use `load`."""
        self._on_recall, self._on_load = on_recall, on_load
        self.loan: LoanState | None = None
        self._recalls, self._began = 0, time.monotonic()
        self._away, self._away_since = 0.0, self._began  # seconds of ended recalls; start of the current recall
        self._turns: dict[str, _Turn] = {}
        self._transfers: dict[tuple[type[Saved | Fetched], int], asyncio.Future[Any]] = {}
        self._reports = 0
        self.busy_seconds = 0.0
        self.prefilled_tokens = 0
        self.iterations = 0
        self.generated_tokens = 0
        self.finished_turns = 0
        self.version = -1
        self.work = LiveWork(Pace())
        super().__init__(link, on_lost)
        self._watcher = background(self._watch(), f"watch {link.name}")

    @property
    def lent(self) -> bool:
        return self._on_recall is not None

    @property
    def away(self) -> str:
        return "" if self.loan is None else self.loan.away

    @property
    def recall_rate(self) -> float:
        return self._recalls / max(1.0, time.monotonic() - self._began)

    @property
    def away_seconds(self) -> float:
        """Total seconds for which its device was recalled."""
        return self._away + (time.monotonic() - self._away_since if self.away else 0.0)

    @property
    def running(self) -> int:
        return len(self._turns)

    async def generate(self, request: Generate, take: Callable[[Piece], None]) -> None:
        """Have a turn generated until it ends by itself or is interrupted. `take` is called with its tokens as they
        arrive. Raises `WorkerLostError` if the engine is lost first, after `take` was called with all tokens that
        arrived."""
        if self.lost:
            raise WorkerLostError(f"engine {self.name} is gone")
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        size = len(request.tokens)
        turn = self._turns[request.id] = _Turn(ended, take, size)
        held = self.work.begun(size)
        self._channel.send(request)
        try:
            await ended
        finally:
            del self._turns[request.id]
            took = self.work.ended(held)
            if ended.cancelled():
                self.interrupt(request.id)
        self.work.pace.observe(turn.generated, took.seconds, took.load_tokens)

    def interrupt(self, turn: str) -> None:
        """Stop a turn now. Its `generate` returns once its last tokens have arrived."""
        if not self.lost:
            self._channel.send(Interrupt(turn))

    @contextmanager
    def expecting(self, tokens: int) -> Iterator[None]:
        """Context that counts a request of `tokens` tokens, in flight to the engine, as part of its load."""
        self.work.load_tokens += tokens
        try:
            yield
        finally:
            self.work.load_tokens -= tokens

    def save(self, order: Save) -> asyncio.Future[Saved | None]:
        """Have KV saved for another engine. The result is None if this engine is lost first."""
        saved = self._told_of(Saved, order.transfer.number)
        if not self.lost:
            self._channel.send(order)
        return saved

    def fetched(self, transfer: int) -> asyncio.Future[Fetched | None]:
        """A future that is done when the frames of a transfer to this engine may be freed; None if it is lost first."""
        return self._told_of(Fetched, transfer)

    async def vacate(self, deadline: float) -> None:
        """Stop all turns now, and wait until the KV that they need is saved, `deadline` seconds at most. A stopped turn
        orders its KV before any other task runs, so the wait includes it."""
        for turn in self._turns:
            self.interrupt(turn)
        ends = time.monotonic() + deadline
        while (left := ends - time.monotonic()) > 0:
            waiting: list[asyncio.Future[Any]] = [turn.ended for turn in self._turns.values()]
            waiting += [saved for (kind, _), saved in self._transfers.items() if kind is Saved]
            if not waiting:
                return
            await asyncio.wait(waiting, timeout=left)

    async def load(self, order: LoadWeights) -> float:
        """Load new weights between two iterations; returns the seconds for which the engine paused."""
        try:
            loaded = await self.ask(order, Loaded, SILENT_LOOKS * LOOK_SECONDS)
        except TimeoutError:
            raise WorkerLostError(f"engine {self.name} did not load weights in time") from None
        self.version = order.version
        return loaded.seconds

    async def drained(self, deadline: float) -> bool:
        """Wait until no turn is running, `deadline` seconds at most. Returns False if turns still run then."""
        ends = time.monotonic() + deadline
        futures = [turn.ended for turn in self._turns.values()]
        if futures:
            await asyncio.wait(futures, timeout=ends - time.monotonic())
        return not any(not future.done() for future in futures)

    def _receive(self, message: FromWorker) -> None:
        self._reports += 1
        match message:
            case Saved() | Fetched():
                self._settle(message)
            case Generated():
                self._take(message)
            case Lent():  # handled here, since a report of the loan may arrive before the caller of `ask` continues
                self.loan = LoanState(message.away, 0.0, 0.0, 0, 0)
                if self.away and self._on_recall is not None:
                    self._on_recall(self)
                super()._receive(message)
            case Loaded() if self._on_load is not None:
                self.version = message.version
                self._on_load(self, message.seconds)
            case _:
                super()._receive(message)

    def _take(self, message: Generated) -> None:
        self.busy_seconds = message.busy_seconds
        self.prefilled_tokens = message.prefilled_tokens
        self.iterations = message.iterations
        self.generated_tokens = message.generated_tokens
        self.finished_turns += len(message.ended)
        for piece in message.pieces:
            turn = self._turns.get(piece.turn)
            if turn is not None:
                turn.generated += len(piece.tokens)
                turn.take(piece)
        for id in message.ended:
            turn = self._turns.get(id)
            if turn is not None and not turn.ended.done():
                turn.ended.set_result(None)
        before, self.loan = self.away, message.loan
        if self._on_recall is not None and bool(before) != bool(self.away):
            self._recalls += bool(self.away)
            if self.away:
                self._away_since = time.monotonic()
            else:
                self._away += time.monotonic() - self._away_since
            self._on_recall(self)

    def _fail_waiters(self) -> None:
        super()._fail_waiters()
        for turn in self._turns.values():
            if not turn.ended.done():
                turn.ended.set_exception(WorkerLostError(f"engine {self.name} was lost"))
        while self._transfers:
            self._transfers.popitem()[1].set_result(None)
        self._watcher.cancel()

    def _told_of(self, kind: type[Answer], transfer: int) -> asyncio.Future[Answer | None]:
        told: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        if self.lost:
            told.set_result(None)
        else:
            self._transfers[kind, transfer] = told
        return told

    def _settle(self, message: Saved | Fetched) -> None:
        kind, transfer = type(message), message.transfer
        told = self._transfers.pop((kind, transfer), None)
        if told is None:
            self.declare_lost(f"it sent {kind.__name__} for transfer {transfer}, which it was not given")
        else:
            told.set_result(message)

    async def _watch(self) -> None:
        """Declare the engine lost if it has turns and makes no progress."""
        silent = 0
        while silent < SILENT_LOOKS:
            reports, running = self._reports, self.running
            await asyncio.sleep(LOOK_SECONDS)
            silent = silent + 1 if running and self._reports == reports else 0
        self.declare_lost(f"it has {self.running} turns but sent no report for {SILENT_LOOKS * LOOK_SECONDS:.0f} s")
