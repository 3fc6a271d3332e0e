"""Carries a plan out as a transaction of moves, and keeps the truth about who does what.

Invariant: a move is done, or undone, or its worker does nothing; never in between, once it has ended. The moves that
are made are a prefix of the plan's, and after each of them the run can go on. What is intended is in the journal before
it is begun, and what came of it when it has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from libra.backends.launch.handles import WorkerFailedError, WorkerLostError
from libra.exec import journal
from libra.exec.assignment import assign, bucket_limits, current_allocation
from libra.exec.journal import Journal
from libra.exec.moves import Move
from libra.exec.workers import DEADLINES, IDLE, Duty, Pool, Role, Worker
from libra.plan.problem import Allocation

_GONE = (WorkerLostError, TimeoutError)  # it says nothing; another process in its slot may do better
_FAILURES = (*_GONE, WorkerFailedError)


class Hands(Protocol):
    """What starts and ends processes. The verbs that take time raise `WorkerLostError`, `WorkerFailedError` or
    `TimeoutError` when they fail; what they left of the worker is then ended with `end`."""

    async def free(self, worker: str, duty: Duty) -> None:
        """Let a worker finish what it does, and end its process."""
        ...

    async def start(self, worker: str, duty: Duty) -> None:
        """Start a process, in service when this returns. What is left of an earlier one is gone before it starts."""
        ...

    def end(self, worker: str, why: str) -> None:
        """End whatever there is of the worker, at once; all that waits for it fails."""
        ...

    def route(self, allocation: Allocation) -> None:
        """Send turns to engines by these buckets from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Moved:
    """One move that ended. `undone`: the worker does again what it did before; `failed`: it does nothing."""

    move: Move
    seconds: float
    outcome: Literal["done", "undone", "failed"]
    why: str = ""  # it was not done


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a plan: the moves that were made, and why the rest was dropped; None: nothing was."""

    moves: tuple[Moved, ...]
    failure: str | None


class Watcher(Protocol):
    """Who is told of changes of the pool."""

    def role(self, worker: Worker) -> None: ...
    def moved(self, moved: Moved) -> None: ...

    def lost(self, worker: str, why: str, retired: bool) -> None:
        """A worker that did something went away. `retired`: its slot is not used any more."""
        ...


class Mover:
    """`longest` are the engine shapes that hold contexts of `longest_context` tokens, the longest there are."""

    def __init__(
        self,
        pool: Pool,
        hands: Hands,
        journal: Journal,
        watcher: Watcher,
        longest: Collection[str],
        longest_context: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self._hands, self._journal, self._watcher, self._clock = hands, journal, watcher, clock
        self._longest, self._longest_context = longest, longest_context
        self._plans: tuple[Allocation, ...] = ()
        self._ends: dict[str, str] = {}  # why a worker went away in the middle of its move
        self._drop: str | None = None  # why no further move of the plan is to be made

    def allocation(self) -> Allocation | None:
        """What the workers do now; None when nothing trains or nothing generates."""
        duties = (worker.duty for worker in self.pool.all())
        return current_allocation(duties, bucket_limits(self._plans), self._longest_context)

    async def start(self, wanted: Allocation) -> None:
        """The first allocation: a core replica, then all others at once. One that goes away on the way is missing when
        this returns; the core replica is started again, until its slot is retired. Raises what a worker says that
        it cannot do, which another would not either, and what made that core replica fail."""
        moves = assign(self.pool.all(), wanted, self._longest)
        self._journal.commit(journal.Plan(wanted, None))
        self._plans = (wanted,)
        core = next(move for move in moves if self.pool[move.worker].allowed == {Role.TRAIN})
        await self._start_first(core)
        others = (self.move(move) for move in moves if move is not core)
        results = await asyncio.gather(*others, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, _GONE):
                raise error
        self._journal.commit(journal.Dropped(str(errors[0])) if errors else journal.Applied())

    async def apply(self, wanted: Allocation) -> Applied:
        """Change what differs, one worker after the other. Raises ValueError where the healthy workers cannot be what
        is wanted: it was planned for others."""
        moves = assign(self.pool.healthy(), wanted, self._longest)
        before = self.allocation()
        self._journal.commit(journal.Plan(wanted, before))
        self._plans = (wanted,) if before is None else (wanted, before)
        self._route()
        self._drop = None
        made: list[Moved] = []
        failure: str | None = None
        for move in moves:
            failure = self._drop
            if failure is not None:
                break
            made.append(await self._carry_out(move))
            if made[-1].outcome != "done":
                failure = f"{move.worker} could not become {move.after}: {made[-1].why}"
                break
        if failure is None:
            self._plans = (wanted,)
            self._journal.commit(journal.Applied())
        else:
            self._journal.commit(journal.Dropped(failure))
        self._route()
        return Applied(tuple(made), failure)

    def drop_rest(self, why: str) -> None:
        """Let the move that is under way end, and make no further one of its plan."""
        self._drop = why

    async def move(self, move: Move) -> float:
        """One move; returns its seconds. Raises what made it fail, and then its worker does nothing."""
        began = self._begin(move)
        try:
            await self._change(move.worker, move.before, move.after)
        except _FAILURES as error:
            self._failed(move, began, self._ended(move.worker, error))
            raise
        return self._done(move, began).seconds

    def lose(self, worker: str, why: str) -> None:
        """A worker went away: its turns go on elsewhere, and its slot may be started again. In the middle of a move,
        that is the move's failure; for a worker that does nothing it is no news."""
        role = self.pool[worker].role
        if role in DEADLINES:
            self._ends[worker] = why
            self._become(worker, Role.FAILED)
            self._hands.end(worker, why)
        elif role in (Role.ROLLOUT, Role.TRAIN):
            self._drop = f"{worker} was lost meanwhile"
            retired = self._count_loss(worker)
            self._journal.commit(journal.Lost(worker, why, retired))
            self._hands.end(worker, why)
            self._route()
            self._watcher.lost(worker, why, retired)

    def fail_overdue(self, step_seconds: float) -> None:
        """Fail the workers that overstay a passing role, where a training step may take `step_seconds`."""
        for worker in self.pool.overdue(self._clock(), step_seconds):
            limit = DEADLINES[worker.role].after(step_seconds)
            self.lose(worker.id, f"it was {worker.role} for more than {limit:.0f} s")

    async def _start_first(self, core: Move) -> None:
        while True:
            try:
                await self.move(core)
                return
            except _GONE:
                if self.pool[core.worker].role is Role.FAILED:
                    raise

    async def _carry_out(self, move: Move) -> Moved:
        """One move, undone if it fails."""
        began = self._begin(move)
        try:
            await self._change(move.worker, move.before, move.after)
        except _FAILURES as error:
            why = self._ended(move.worker, error)
        else:
            return self._done(move, began)
        if move.before != IDLE:
            try:
                self._become(move.worker, Role.IDLE)
                await self._change(move.worker, IDLE, move.before)
            except _FAILURES as error:
                why = f"{why}; then it could not become {move.before} again: {self._ended(move.worker, error)}"
            else:
                return self._undone(move, began, why)
        return self._failed(move, began, why)

    async def _change(self, worker: str, before: Duty, after: Duty) -> None:
        """The steps of a move. Raises `WorkerLostError` when the worker went away while nobody waited for it."""
        if before != IDLE:
            draining = self._become(worker, Role.DRAINING, before.shape)
            self._route()
            await self._hands.free(worker, before)
            self._require(draining)
            self._become(worker, Role.IDLE)
        joining = self._become(worker, Role.JOINING, after.shape)
        await self._hands.start(worker, after)
        self._require(joining)
        self._become(worker, after.role, after.shape)
        self._route()

    def _require(self, expected: Worker) -> None:
        if self.pool[expected.id] != expected:
            raise WorkerLostError(f"worker {expected.id} went away")

    def _begin(self, move: Move) -> float:
        self._journal.commit(journal.Intend(move.worker, move.before, move.after))
        return self._clock()

    def _ended(self, worker: str, error: BaseException) -> str:
        """Make sure that nothing of the worker is left after a failure; returns the reason for it."""
        if self.pool[worker].role is not Role.FAILED:
            self._become(worker, Role.FAILED)
            self._hands.end(worker, str(error))
        return self._ends.pop(worker, str(error) or type(error).__name__)

    def _done(self, move: Move, began: float) -> Moved:
        moved = Moved(move, self._clock() - began, "done")
        self._journal.commit(journal.Done(move.worker, moved.seconds))
        self._watcher.moved(moved)
        return moved

    def _undone(self, move: Move, began: float, why: str) -> Moved:
        moved = Moved(move, self._clock() - began, "undone", why)
        self._journal.commit(journal.Undone(move.worker, moved.seconds, why))
        self._watcher.moved(moved)
        return moved

    def _failed(self, move: Move, began: float, why: str) -> Moved:
        moved = Moved(move, self._clock() - began, "failed", why)
        retired = self._count_loss(move.worker)
        self._journal.commit(journal.Failed(move.worker, moved.seconds, why, retired))
        self._watcher.moved(moved)
        return moved

    def _count_loss(self, worker: str) -> bool:
        """Whether the slot is retired with it; otherwise it is idle."""
        lost = self.pool.lose(worker, self._clock())
        self._watcher.role(lost)
        if not lost.retired:
            self._become(worker, Role.IDLE)
        return lost.retired

    def _become(self, worker: str, role: Role, shape: str | None = None) -> Worker:
        changed = self.pool.become(worker, role, self._clock(), shape)
        self._watcher.role(changed)
        return changed

    def _route(self) -> None:
        allocation = self.allocation()
        if allocation is not None:
            self._hands.route(allocation)
