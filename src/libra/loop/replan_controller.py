"""Decides when to plan again, and has the executor carry out the plan during the steps.

Invariant: one decision at a time is in progress. It uses this run's measurements and the workers present now, and is
carried out during the steps. After a loss, the run plans again as soon as no move is in progress.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from libra.exec.executor import Executor
from libra.exec.pool import fitted
from libra.exec.protocols import ProcessController
from libra.loop.observations import Observations
from libra.loop.periods import Periods, Stayed
from libra.loop.recorder import Recorder
from libra.plan.allocation import Allocation
from libra.plan.options.price import infeasibility, price
from libra.plan.price_bias import EXACT
from libra.plan.replanner import Proposal
from libra.plan.site import SlotSite
from libra.plan.solution import Prediction
from libra.plan.transition import Role, Transition
from libra.records.schema import DecisionRecord


@dataclass(eq=False)
class ReplanController:
    """Changes a run's allocation and tracks its periods. Call methods at step boundaries, except `worker_lost`."""

    executor: Executor[ProcessController]
    observations: Observations
    recorder: Recorder
    say: Callable[[str], None]  # called with a line about each decision
    first: Allocation  # at the start of the run; it stays in force unless the run is `adaptive`
    steps: int
    period: int  # steps between two decisions
    seed: int
    adaptive: bool
    first_period: int

    def __post_init__(self) -> None:
        self.periods = Periods(self.recorder, self.observations.learn, self.first_period)
        self.changed: Callable[[], None] = lambda: None  # called when `at_boundary` may have work
        self.last_decision = ""
        self._step = 0
        self._period_began = 0  # the step after which the last period began, or would have with a prediction
        self._task: asyncio.Task[None] | None = None
        self._applying = False
        self._left: Allocation | None = None
        self._lost = False

    @property
    def urgent(self) -> bool:
        """Whether a loss still requires a new plan."""
        return self._lost and (self._task is None or self._task.done())

    def worker_lost(self) -> None:
        """Record that the pool has fewer workers than the plan. The run plans again at the next step boundary."""
        self._lost = True
        self.periods.mark_switching()
        self.changed()

    def begin(self, step: int) -> None:
        """Begin the first period after `step`. A run that borrows devices plans before its first step: whether a loan
        pays, and for which contexts, depends on grants that were unknown when the configuration was written."""
        self._step = step
        self._lost = self._any_idle()  # a worker was lost before this controller could plan around it
        borrows = any(worker.lent is not None for worker in self.executor.pool.healthy())
        if step == 0 and self.adaptive and borrows and not self._lost:
            self._task = asyncio.create_task(self._decide(self.steps, untried=True))
            self._task.add_done_callback(lambda task: self.changed())
        self._begin_period(switching=False)

    def stepped(self, step: int, seconds: float) -> None:
        self._step = step
        self.periods.step(seconds)

    def at_boundary(self) -> None:
        """Close a period that has ended, and start a decision if one is due. Raises the error of a decision."""
        self.require_sound()
        ended = self._task is not None and self._task.done()
        if ended:
            self._task = None
        applied, self._applying = ended and self._applying, self._applying and not ended
        if self.urgent:
            self._lost = False
            self._next_period(decide=True, forced=True)
        elif applied:
            self._next_period(decide=False, tried=self._left is None or self._keeps_ranges_of(self._left))
        elif self._step - self._period_began >= self.period:
            self._next_period(decide=self.adaptive or self._any_idle())

    def require_sound(self) -> None:
        """Raise the error of a failed decision, if one failed."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            error = self._task.exception()
            if error is not None:
                raise error

    async def finish(self) -> None:
        """Make no further changes: wait for a move in progress, and drop a plan that has not begun."""
        if self._task is None:
            return
        if self._applying:
            self.executor.drop_rest("the run has made all its steps")
            await self._task
        else:
            await self.cancel()

    async def cancel(self) -> None:
        """Cancel the decision at once, also in the middle of a move."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(self._task, return_exceptions=True)

    def close(self) -> None:
        """End the last period."""
        self.periods.end(self._hindsight, self._without_change)

    def _any_idle(self) -> bool:
        return any(worker.role is Role.IDLE for worker in self.executor.pool.healthy())

    def _next_period(self, decide: bool, forced: bool = False, tried: bool = True) -> None:
        """End the period, start a decision, and predict the next period."""
        self.periods.end(self._hindsight, self._without_change)
        steps_left = self.steps - self._step
        if decide and steps_left > 0 and self._task is None:
            self._task = asyncio.create_task(self._decide(steps_left))
            self._task.add_done_callback(lambda task: self.changed())
        self._begin_period(switching=self._applying or forced, tried=tried)

    def _hindsight(self) -> Prediction | None:
        """The price of the current allocation for the latest measured work and speeds."""
        allocation = self.executor.allocation()
        return None if allocation is None else self._price(allocation, tried=True, ahead=False)

    def _without_change(self) -> Stayed | None:
        """Step seconds of the allocation before the last change, for the currently tracked work; None if unknown."""
        if self._left is None:
            return None
        priced = self._price(self._left, self._keeps_ranges_of(self._left), ahead=False)
        if priced is None:
            return None
        bias = self.observations.replanner.bias
        stayed = bias.corrected(priced)
        return Stayed(stayed.step, bias.error(stayed.bottleneck) * stayed.step)

    def _keeps_ranges_of(self, allocation: Allocation) -> bool:
        """Whether the current buckets have the same ranges as those of `allocation`, so that its router hits are
        known."""
        now = self.executor.allocation()
        return now is not None and now.ranges == allocation.ranges

    def _begin_period(self, switching: bool, tried: bool = True) -> None:
        """Predict the next period. Buckets whose ranges were not `tried` before have unknown router hits."""
        self._period_began = self._step
        allocation = self.executor.allocation()
        priced = None if allocation is None else self._price(allocation, tried)
        if allocation is not None and priced is not None:
            predicted = self.observations.replanner.bias.corrected(priced)
            self.periods.begin(self._step + 1, allocation.describe(), priced, predicted, switching)

    def _price(self, allocation: Allocation, tried: bool, ahead: bool = True) -> Prediction | None:
        """The price of an allocation, or None if the allocation does not fit. With `ahead`, it is for the forecast work
        of the next period, otherwise for the currently tracked work."""
        site, replanner = self._site(allocation if tried else None), self.observations.replanner
        [question] = site.questions([replanner.forecast(site) if ahead else replanner.scenario(site)])
        return price(question.problem, allocation) if infeasibility(question.problem, allocation) is None else None

    def _site(self, current: Allocation | None) -> SlotSite:
        return self.observations.site(self.executor.pool.devices(), current)

    async def _decide(self, steps_left: int, untried: bool = False) -> None:
        """Plan, decide, and carry out the decision during the steps. An `untried` current allocation is as uncertain as
        the proposed one, so uncertainty of work or prices is then no reason to keep it.
        """
        workers, current = self.executor.pool.healthy(), self.executor.allocation()
        if not self.adaptive:
            # The allocation may do without a lent device, but a returned device is borrowed again.
            back = any(worker.lent is not None and worker.role is Role.IDLE for worker in workers)
            if not back and current is not None and self._price(current, tried=True) is not None:
                return
            pool = self.executor.pool
            if all(worker in workers for worker in pool.all() if worker.lent is None):
                await self._apply(self.executor.transition(fitted(self.first, workers, pool.lent_shapes())))
                return
        began = time.monotonic()
        replanner = self.observations.replanner
        outlook = replanner.outlook(self._site(current), steps_left)
        if untried:
            outlook = replace(outlook, uncertainty=0.0, bias=EXACT)
        proposal = await asyncio.to_thread(outlook.propose, self.seed)
        if self.executor.pool.healthy() != workers:
            self.worker_lost()  # the workers changed during planning
            return
        replanner.decided(proposal)
        self._record(proposal, time.monotonic() - began)
        if proposal.decision.taken:
            await self._apply(proposal.decision.transition)

    async def _apply(self, transition: Transition) -> None:
        self._applying = True
        self._left = transition.before
        self.periods.mark_switching()
        applied = await self.executor.apply(transition)
        for moved in applied.moves:
            if moved.outcome == "done":
                self.observations.observe_move(moved.move.after.role, moved.seconds)
        if applied.failure is None:
            self.periods.carried_out(sum(moved.seconds for moved in applied.moves))
        else:
            self.periods.dropped()
            self.recorder.event("warning", None, f"the plan is dropped: {applied.failure}")
        # Idle slots start first, so a slot that is idle after an undone move lost its worker meanwhile. Planning again
        # ends: a slot that loses its process again and again is retired.
        if any(moved.outcome == "failed" for moved in applied.moves) or (applied.failure and self._any_idle()):
            self.worker_lost()

    def _record(self, proposal: Proposal, seconds: float) -> None:
        plan, decision = proposal.plan, proposal.decision
        current, after = decision.transition.before, decision.proposed.step
        before = decision.current.step if decision.current is not None else after
        record = DecisionRecord(
            period=self.periods.number,
            step=self._step,
            time=self.recorder.now(),
            before=current.describe() if current is not None else "nothing that can continue",
            after=plan.allocation.describe(),
            before_seconds=before,
            after_seconds=after,
            gain_per_step=before - after,
            horizon_steps=int(decision.horizon_steps),
            cost=decision.cost,
            uncertainty=decision.doubt,
            price_error=decision.price_error,
            taken=decision.taken,
            reason=decision.reason,
            solver_status=plan.proof.status,
            solver_gap=plan.proof.gap,
            solver_seconds=seconds,
            moves=decision.transition.words(),
            measured_before=self.periods.measured_before,
        )
        self.periods.decided(record)
        which = f"{record.before} → {record.after}" if decision.taken else "kept"
        limits = " (no worker changes its role)" if decision.taken and not decision.transition.moves else ""
        self.last_decision = f"step {self._step}: {which}{limits}: {decision.reason}"
        self.say(f"decision at {self.last_decision}")
