"""Recovery of workers that are lost during the first start, or during work between steps, such as an evaluation.

Invariant: the remaining workers return to their earlier duties while the work continues, or before it begins again.
Without a remaining worker, the work ends with an error. A started move ends before `during` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from libra.exec.executor import FAILURES, Executor
from libra.exec.pool import fitted
from libra.exec.protocols import ProcessController
from libra.plan.allocation import Allocation
from libra.plan.problem import InfeasiblePlanError

T = TypeVar("T")
_ATTEMPTS = 3  # at work that begins again; if each loses a worker, another attempt would not remove the cause
_MOST_UNDONE = 3  # plans that may fail without the loss of a slot before the work ends with an error


class Recovery:
    """Restores lost workers. `first` replaces an impossible current allocation; `warn` is called with each failure."""

    def __init__(self, executor: Executor[ProcessController], first: Allocation, warn: Callable[[str], None]) -> None:
        self._executor, self._first, self._warn = executor, first, warn
        self._lost = asyncio.Event()

    def worker_lost(self) -> None:
        """Record that the pool has lost a worker."""
        self._lost.set()

    async def start(self) -> None:
        """Start the first workers. Raises the errors of `Executor.start` and `during`."""
        pool = self._executor.pool
        await self._executor.start(fitted(self._first, pool.healthy(), pool.lent_shapes()))
        await self._recover(self._first, lambda: False)

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises its errors, and `CoreLostError` or `InfeasiblePlanError` if the remaining
        workers cannot continue."""
        wanted = self._wanted()
        task = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._executor.drop_rest("the work is done"))
        try:
            while not task.done():
                await self._recover(wanted, task.done)
                lost = asyncio.create_task(self._lost.wait())
                await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
                lost.cancel()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def attempts(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work that moves workers itself, and return its result. After the loss of a worker, the work begins again
        once the workers have their earlier duties. Raises the error of the last attempt, and the errors of `during`.
        """
        wanted = self._wanted()
        for _ in range(_ATTEMPTS - 1):
            try:
                return await work()
            except FAILURES as error:
                self._warn(f"{what} begins again: {error}")
                await self._recover(wanted, lambda: False)
        return await work()

    def _wanted(self) -> Allocation:
        """The current allocation, or the first one if no engine for the longest contexts is left."""
        now = self._executor.allocation()
        return now if now is not None and self._executor.holds_longest(now) else self._first

    async def _recover(self, wanted: Allocation, over: Callable[[], bool]) -> None:
        """Restore `wanted`. Idle slots whose starts fail are retired, so only undone moves need a limit."""
        undone = 0
        while not over():
            self._lost.clear()
            self._executor.processes.require_core()
            whole = fitted(wanted, self._executor.pool.healthy(), self._executor.pool.lent_shapes())
            if self._executor.allocation() == whole:
                return
            applied = await self._executor.apply(self._executor.transition(whole))
            if over() or (applied.failure is None and not self._lost.is_set()):
                return
            if applied.failure is None:
                continue  # a worker lost during the last of these moves is still missing
            self._warn(f"the workers are not {whole.describe()} again: {applied.failure}")
            undone += any(moved.outcome == "undone" for moved in applied.moves)
            if undone == _MOST_UNDONE:
                raise InfeasiblePlanError(f"the remaining workers do not become {whole.describe()}")
