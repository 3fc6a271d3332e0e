"""When to plan again, and what becomes of it, while the steps go on.

Invariant: a decision is made from what this run has measured, for the workers that there are, and carried out beside
the steps; one at a time. A worker that is lost is planned around as soon as no move is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from libra.config.run import RunConfig
from libra.exec.assignment import describe
from libra.exec.executor import Executor
from libra.exec.workers import Role
from libra.loop.periods import Periods
from libra.loop.recorder import Recorder
from libra.loop.replanning import Proposal, Replanner
from libra.plan.options.price import infeasibility, price
from libra.plan.problem import Allocation
from libra.records.schema import DecisionRecord
from libra.report.live import Display


class Steering:
    """The periods of a run and its changes of allocation. The verbs belong to step boundaries, except `worker_lost`."""

    def __init__(
        self,
        config: RunConfig,
        executor: Executor,
        replanner: Replanner,
        recorder: Recorder,
        display: Display,
        home: Allocation,
        first_period: int,
    ) -> None:
        """`home` is the allocation that the run began with, and keeps with `allocation: static`."""
        self._config, self._executor, self._replanner = config, executor, replanner
        self._recorder, self._display = recorder, display
        self.periods = Periods(recorder, first_period)
        self.changed: Callable[[], None] = lambda: None  # told when there may be something to do at a boundary
        self.last_decision = ""
        self._step = 0
        self._page = 0  # the step after which the last period began, or should have
        self._home = home
        self._task: asyncio.Task[None] | None = None
        self._applying = False
        self._left: Allocation | None = None
        self._lost = False

    @property
    def urgent(self) -> bool:
        """A loss waits to be planned around."""
        return self._lost and (self._task is None or self._task.done())

    def worker_lost(self) -> None:
        """The pool is less than the plan wants: plan again at the next boundary."""
        self._lost = True
        self.periods.mark_switching()
        self.changed()

    def begin(self, step: int) -> None:
        """The first period begins after `step`."""
        self._step = step
        self._lost = self._any_idle()  # lost before there was somebody to plan around it
        self._begin_period(switching=False)

    def stepped(self, step: int, seconds: float) -> None:
        self._step = step
        self.periods.step(seconds)

    def at_boundary(self) -> None:
        """Close what is to be closed, decide what is to be decided. Raises what a decision raised."""
        self.require_sound()
        ended = self._task is not None and self._task.done()
        if ended:
            self._task = None
        applied, self._applying = ended and self._applying, self._applying and not ended
        if self.urgent:
            self._lost = False
            self._turn_page(decide=True, forced=True)
        elif applied:
            self._turn_page(decide=False, tried=False)
        elif self._step - self._page >= self._config.planner.period:
            self._turn_page(decide=self._config.allocation == "adaptive" or self._any_idle())

    def require_sound(self) -> None:
        """Raise what a decision raised."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            error = self._task.exception()
            if error is not None:
                raise error

    async def finish(self) -> None:
        """No further change: a move that is under way ends, a plan that is not carried out yet is dropped."""
        if self._task is None:
            return
        if self._applying:
            self._executor.drop_rest("the run has made all its steps")
            await self._task
        else:
            await self.cancel()

    async def cancel(self) -> None:
        """End at once, in the middle of whatever is under way."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(self._task, return_exceptions=True)

    def close(self) -> None:
        """The last period ends."""
        self.periods.end(self._without_change)

    def _any_idle(self) -> bool:
        return any(worker.role is Role.IDLE for worker in self._executor.healthy())

    def _turn_page(self, decide: bool, forced: bool = False, tried: bool = True) -> None:
        """End the period, ask for a decision, and predict the next period."""
        self.periods.end(self._without_change)
        steps_left = self._config.training.steps - self._step
        if decide and steps_left > 0 and self._task is None:
            self._task = asyncio.create_task(self._decide(steps_left))
            self._task.add_done_callback(lambda task: self.changed())
        self._begin_period(switching=self._applying or forced, tried=tried)

    def _without_change(self) -> float | None:
        """Step seconds of the allocation that was left last, for the work as it is tracked now."""
        if self._left is None:
            return None
        problem = self._replanner.request(self._executor.healthy(), None).problem()
        return price(problem, self._left).step if infeasibility(problem, self._left) is None else None

    def _begin_period(self, switching: bool, tried: bool = True) -> None:
        """Predict the next period. Buckets that were not `tried` yet have no known router."""
        self._page = self._step
        allocation = self._executor.allocation()
        if allocation is None:
            return
        problem = self._replanner.request(self._executor.healthy(), allocation if tried else None).problem()
        if infeasibility(problem, allocation) is None:
            self.periods.begin(self._step + 1, describe(allocation), price(problem, allocation), switching)

    async def _decide(self, steps_left: int) -> None:
        """Plan, decide, and carry the decision out, while the steps go on."""
        workers, current = self._executor.healthy(), self._executor.allocation()
        request = self._replanner.request(workers, current)
        if self._config.allocation == "static":
            if current is not None and infeasibility(request.problem(), current) is None:
                return
            if self._home.replicas + self._home.engines == len(workers):
                await self._apply(self._home, current)
                return
        began = time.monotonic()
        proposal = await asyncio.to_thread(self._replanner.propose, request, steps_left)
        if self._executor.healthy() != workers:
            self.worker_lost()  # it was planned for others
            return
        self._record(proposal, current, time.monotonic() - began)
        if proposal.decision.taken:
            await self._apply(proposal.plan.allocation, current)

    async def _apply(self, wanted: Allocation, current: Allocation | None) -> None:
        self._applying = True
        self._left = current
        self.periods.mark_switching()
        applied = await self._executor.apply(wanted)
        for moved in applied.moves:
            if moved.outcome == "done":
                self._replanner.observe_move(moved.move.after.role, moved.seconds)
        if applied.failure is None:
            self.periods.carried_out(sum(moved.seconds for moved in applied.moves))
        else:
            self.periods.dropped()
            self._recorder.event("warning", None, f"the plan is dropped: {applied.failure}")
        # Idle slots start first, so one that is idle after an undone move was lost meanwhile. That cannot go on for
        # ever: a slot that loses its process again and again is retired.
        if any(moved.outcome == "failed" for moved in applied.moves) or (applied.failure and self._any_idle()):
            self.worker_lost()

    def _record(self, proposal: Proposal, current: Allocation | None, seconds: float) -> None:
        plan, decision = proposal.plan, proposal.decision
        before = decision.current.step if decision.current is not None else plan.predicted.step
        record = DecisionRecord(
            period=self.periods.number,
            step=self._step,
            time=self._recorder.now(),
            before=describe(current) if current is not None else "nothing that can go on",
            after=describe(plan.allocation),
            before_seconds=before,
            after_seconds=plan.predicted.step,
            gain_per_step=before - plan.predicted.step,
            horizon_steps=int(decision.horizon_steps),
            cost=decision.cost,
            uncertainty=decision.uncertainty * before,
            taken=decision.taken,
            reason=decision.reason,
            solver_status=plan.proof.status,
            solver_gap=plan.proof.gap,
            solver_seconds=seconds,
            moves=tuple(str(move) for move in decision.moves),
            measured_before=self.periods.measured_before,
        )
        self.periods.decided(record)
        verb = "changed" if decision.taken else "kept"
        self.last_decision = f"step {self._step}: {verb}: {decision.reason}"
        self._display.line(f"decision at {self.last_decision}")
