"""The executor: carries out a plan's transition, move by move, and keeps the duty of each worker.

Invariant: an ended move is done, undone, or failed with its worker idle. The executed moves are a prefix of the
transition's moves, and the run can continue after each move. The journal gets the intention before the move begins, and
the outcome after its end. Only the `ProcessController` starts and ends processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from libra.exec import journal
from libra.exec.background import background
from libra.exec.journal import Journal
from libra.exec.pool import DEADLINES, Worker, WorkerPool, bucket_limits, current_allocation
from libra.exec.protocols import (
    Applied,
    MoveOutcome,
    Outcome,
    PoolObserver,
    ProcessController,
    UnsupportedTransitionError,
    WorkerFailedError,
    WorkerLostError,
)
from libra.plan.allocation import Allocation
from libra.plan.transition import IDLE, Duty, Move, Role, Transition, device_transition

Processes = TypeVar("Processes", bound=ProcessController, covariant=True)

_WATCH_SECONDS = 1.0  # between two checks of the workers' processes
_GONE = (WorkerLostError, TimeoutError)  # failures after which another process in the same slot may succeed
FAILURES = (*_GONE, WorkerFailedError)


class Executor(Generic[Processes]):
    """Moves workers between duties. `longest` has the shapes whose engines can hold contexts of `longest_context`
    tokens."""

    def __init__(
        self,
        pool: WorkerPool,
        processes: Processes,
        journal: Journal,
        observer: PoolObserver,
        longest: Collection[str],
        longest_context: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self.processes, self.longest_context = pool, processes, longest_context
        self._journal, self._observer, self._clock, self._longest = journal, observer, clock, longest
        self._plans: tuple[Allocation, ...] = ()
        self._ends: dict[str, str] = {}  # reason why a worker was lost during its move
        self._drop: str | None = None  # reason to make no further moves of the plan; None: continue
        self._watch: asyncio.Task[None] | None = None

    def allocation(self) -> Allocation | None:
        """The workers' current allocation; None if no worker trains or none generates."""
        duties = (worker.duty for worker in self.pool.all())
        return current_allocation(duties, bucket_limits(self._plans), self.longest_context)

    def holds_longest(self, allocation: Allocation) -> bool:
        """Whether the allocation has an engine for the longest contexts. Transitions lead only to such allocations."""
        return any(bucket.shape in self._longest for bucket in allocation.buckets)

    def transition(self, wanted: Allocation) -> Transition:
        """The transition from the healthy workers' current duties to `wanted`. Raises `ValueError` if the workers
        cannot form `wanted`."""
        return device_transition(self.pool.devices(), self.allocation(), wanted, self._longest)

    def watch(self) -> None:
        """Start checking the workers' processes, until `stop`."""
        self._watch = background(self._watch_workers())

    async def stop(self) -> None:
        """End all workers in order."""
        if self._watch is not None:
            self._watch.cancel()
        await self.processes.stop()

    async def start(self, wanted: Allocation) -> None:
        """Start the first allocation: a core replica, then all other workers at the same time. Workers lost meanwhile
        are missing when this returns. The core replica is started again until its slot is retired; then its failure is
        raised. Also raises a worker's `WorkerFailedError`, since another process would fail in the same way.
        """
        moves = device_transition(self.pool.devices(), None, wanted, self._longest).moves
        self._journal.commit(journal.TransitionBegun(wanted, None))
        self._plans = (wanted,)
        core = next(move for move in moves if self.pool[move.worker].allowed == {Role.TRAIN})
        await self._start_first(core)
        others = (self.move(move) for move in moves if move is not core)
        results = await asyncio.gather(*others, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, _GONE):
                raise error
        self._journal.commit(journal.TransitionDropped(str(errors[0])) if errors else journal.TransitionDone())

    async def apply(self, transition: Transition) -> Applied:
        """Make the transition's moves, one after the other. Raises `ValueError` if the duties of its workers have
        changed, and `UnsupportedTransitionError` if the backend does not support a part of the plan.
        """
        unsupported = self.processes.unsupported(transition)
        if unsupported is not None:
            raise UnsupportedTransitionError(unsupported)
        shapes = transition.after.engines_by_shape
        concerned = [worker for worker in self.pool.healthy() if worker.lent is None or shapes[worker.lent]]
        conflict = transition.conflict({worker.id: worker.duty for worker in concerned})
        if conflict is not None:
            raise ValueError(f"the transition was planned for other workers: {conflict}; plan again")
        wanted, before = transition.after, self.allocation()
        self._journal.commit(journal.TransitionBegun(wanted, before))
        self._plans = (wanted,) if before is None else (wanted, before)
        self._route()
        self._drop = None
        made: list[MoveOutcome] = []
        failure: str | None = None
        for move in transition.moves:
            failure = self._drop
            if failure is not None:
                break
            made.append(await self._carry_out(move))
            if made[-1].outcome != "done":
                failure = f"{move.worker} could not become {move.after}: {made[-1].why}"
                break
        if failure is None:
            self._plans = (wanted,)
            self._journal.commit(journal.TransitionDone())
        else:
            self._journal.commit(journal.TransitionDropped(failure))
        self._route()
        return Applied(tuple(made), failure)

    async def restart(self, name: str) -> float:
        """End a worker's process and start it again in the same role; returns the seconds for which it was out of
        service. Raises `WorkerLostError` for a worker without a duty, and the error of a failed move."""
        duty = self.pool[name].duty
        if duty.role not in (Role.ROLLOUT, Role.TRAIN):  # it is idle or retired
            raise WorkerLostError(f"worker {name} has no role to restart in")
        return await self.move(Move(name, duty, duty))

    def drop_rest(self, why: str) -> None:
        """End the current transition after the move in progress."""
        self._drop = why

    async def move(self, move: Move) -> float:
        """Make one move; returns its seconds. Raises the error of a failed move; its worker is then idle."""
        began = self._begin(move)
        try:
            await self._change(move.worker, move.before, move.after)
        except FAILURES as error:
            self._end(move, began, "failed", self._ended(move.worker, error))
            raise
        return self._end(move, began, "done").seconds

    def lose(self, worker: str, why: str) -> None:
        """Handle the loss of a worker: its turns continue elsewhere, and another process may start in its slot. A move
        in progress fails. The loss of a worker without a duty is ignored."""
        role = self.pool[worker].role
        if role in DEADLINES:
            self._ends[worker] = why
            self._become(worker, Role.FAILED)
            self.processes.end(worker, why)
        elif role in (Role.ROLLOUT, Role.TRAIN):
            self._drop = f"{worker} was lost meanwhile"
            retired = self._count_loss(worker)
            self._journal.commit(journal.WorkerLost(worker, why, retired))
            self.processes.end(worker, why)
            self._route()
            self._observer.lost(worker, why, retired)

    def fail_overdue(self, step_seconds: float) -> None:
        """Fail the workers that exceed the time limit of a transitional role; a training step may take
        `step_seconds`."""
        for worker in self.pool.overdue(self._clock(), step_seconds):
            limit = DEADLINES[worker.role].after(step_seconds)
            self.lose(worker.id, f"it was {worker.role} for more than {limit:.0f} s")

    def slots_changed(self) -> None:
        """Update the workers whose nodes were lost or have returned."""
        for worker in self.pool.all():
            lost = not self.processes.offers(worker.slot)
            if worker.node_lost != lost:
                changed = self.pool.set_node_lost(worker.id, lost)
                if not lost and not changed.retired:
                    self._observer.node_back(worker.id)

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self.processes.declare_dead()
            self.fail_overdue(self.processes.step_allowance)

    async def _start_first(self, core: Move) -> None:
        while True:
            try:
                await self.move(core)
                return
            except _GONE:
                if self.pool[core.worker].role is Role.FAILED:
                    raise

    async def _carry_out(self, move: Move) -> MoveOutcome:
        """Make one move, and undo it if it fails."""
        began = self._begin(move)
        try:
            await self._change(move.worker, move.before, move.after)
        except FAILURES as error:
            why = self._ended(move.worker, error)
        else:
            return self._end(move, began, "done")
        if move.before != IDLE:
            try:
                self._become(move.worker, Role.IDLE)
                await self._change(move.worker, IDLE, move.before)
            except FAILURES as error:
                why = f"{why}; then it could not become {move.before} again: {self._ended(move.worker, error)}"
            else:
                return self._end(move, began, "undone", why)
        return self._end(move, began, "failed", why)

    async def _change(self, worker: str, before: Duty, after: Duty) -> None:
        """Make the steps of a move. Raises `WorkerLostError` if the worker is lost, even if the step itself
        succeeds."""
        if before != IDLE:
            draining = self._become(worker, Role.DRAINING, before.shape)
            self._route()
            await self.processes.free(worker, before, after)
            self._require(draining)
            self._become(worker, Role.IDLE)
        joining = self._become(worker, Role.JOINING, after.shape)
        await self.processes.start(worker, after)
        self._require(joining)
        self._become(worker, after.role, after.shape)
        self._route()

    def _require(self, expected: Worker) -> None:
        if self.pool[expected.id] != expected:
            raise WorkerLostError(f"worker {expected.id} was lost")

    def _begin(self, move: Move) -> float:
        self._journal.commit(journal.MoveBegun(move.worker, move.before, move.after))
        return self._clock()

    def _ended(self, worker: str, error: BaseException) -> str:
        """End the remaining processes of a failed worker; returns the reason of the failure."""
        if self.pool[worker].role is not Role.FAILED:
            self._become(worker, Role.FAILED)
            self.processes.end(worker, str(error))
        return self._ends.pop(worker, str(error) or type(error).__name__)

    def _end(self, move: Move, began: float, outcome: Outcome, why: str = "") -> MoveOutcome:
        """Record and report an ended move. After a failed move the slot is idle or retired."""
        moved = MoveOutcome(move, self._clock() - began, outcome, why)
        entry: journal.Entry
        match outcome:
            case "done":
                entry = journal.MoveDone(move.worker, moved.seconds)
            case "undone":
                entry = journal.MoveUndone(move.worker, moved.seconds, why)
            case "failed":
                entry = journal.MoveFailed(move.worker, moved.seconds, why, self._count_loss(move.worker))
        self._journal.commit(entry)
        self._observer.moved(moved)
        return moved

    def _count_loss(self, worker: str) -> bool:
        """Count the loss of a process. Returns whether its slot is retired; otherwise the slot is idle."""
        lost = self.pool.lose(worker, self._clock())
        self._observer.role(lost)
        if not lost.retired:
            self._become(worker, Role.IDLE)
        return lost.retired

    def _become(self, worker: str, role: Role, shape: str | None = None) -> Worker:
        changed = self.pool.become(worker, role, self._clock(), shape)
        self._observer.role(changed)
        return changed

    def _route(self) -> None:
        allocation = self.allocation()
        if allocation is not None:
            self.processes.route(allocation)
