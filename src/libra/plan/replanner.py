"""Keeps a training loop on a plan that fits what its trajectories have become.

Invariant: the plan in force is the one that the last taken decision proposed, and every decision was made of this run's
own trajectories: of what has finished, and of what is running as far as it has come. A replanner starts nothing and
waits for nothing but its solver; carrying out the moves is the loop's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from libra.cost.device import SwitchCost
from libra.lengths import LengthTracker
from libra.lengths.forecast import Forecast, scaled
from libra.plan.model.solve import solve
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.held import sharing_layouts
from libra.plan.options.price import infeasibility, price
from libra.plan.placement import place
from libra.plan.plan import Plan, answer
from libra.plan.planner import CLASSES, Planner, what_runs
from libra.plan.problem import Allocation, Prediction, Problem, Proof, Solution
from libra.plan.recipe_tracker import recipe_tracker
from libra.plan.replan import Case, Decision, decide_over, expected
from libra.plan.switching import live_refill, switch_cost, switch_seconds
from libra.trajectory import Trajectory

# Of the trajectories' weight: with less, near-equal plans trade places on noise. After a change that it detects, the
# tracker forgets four times as fast by itself. `benchmarks.replanning` compares.
REPLANNER_HALF_LIFE_STEPS = 12.0
# Assumed: by how much lengths may change within a period without a trend that shows it yet, as a relative error. A plan
# that just keeps its step may need several times as long when its longest trajectories are a tenth longer.
_UNSEEN = 0.1
_CONFIDENCE = 2.0  # standard errors of the tracked work that a gain has to exceed: 95 % of errors are smaller
# Lengths are as forecast, give or take an error that is normal in the logarithm. The mean of a price over it is taken
# at three points (Gauss-Hermite quadrature): so many standard errors from the forecast, each with its weight.
_NODES = ((0.0, 2 / 3), (-math.sqrt(3), 1 / 6), (math.sqrt(3), 1 / 6))


@dataclass(frozen=True, slots=True)
class Look:
    """One decision, and what became of it. Seconds are of one optimiser step."""

    decision: Decision
    predicted: Prediction  # of the plan in force after the decision, for the work that the decision was made for
    before: float | None  # seconds measured since the decision before this one; None: none were
    realised: float | None = None  # seconds measured since; None: not yet

    @property
    def realised_gain(self) -> float | None:
        """Measured seconds saved since the decision; beside `decision.gain_per_step` where it was taken. Changes in
        between are in it, and the work may have changed as well. None as long as either side has not been measured."""
        return None if self.before is None or self.realised is None else self.before - self.realised


class Replanner:
    """`Replanner(planner, plan).step(finished, running)`, called every `period` steps, says whether to change the plan.

    A change has to earn its cost back within the steps for which plans have held so far, on average. Prices take a
    router to be as good as the recipe says for any ranges.

    Threads may share a replanner: each call is one whole step of it. What it returns are values, and can be pickled.
    """

    def __init__(
        self,
        planner: Planner,
        plan: Plan | None = None,
        *,
        period: int = 5,
        tracker: LengthTracker | None = None,
        switch: SwitchCost | None = None,
    ) -> None:
        """`plan` is what runs; without one the first decision starts the best. `switch` are measured role changes,
        instead of the stated ones of `libra.plan.switching`. A `tracker` that has seen trajectories is gone on with.
        """
        if period < 1:
            raise ValueError(f"period is {period}; it is a number of steps between two decisions, 1 or more")
        self._planner, self._period, self._switch = planner, period, switch
        self._plan = plan
        self._looks: list[Look] = []
        self._measured: float | None = None
        self._lock = Lock()
        if tracker is None:
            tracker = recipe_tracker(planner.recipe, REPLANNER_HALF_LIFE_STEPS)
            tracker.observe_running(())  # from here on evidence is weighed by start version
        self._tracker = tracker

    @property
    def plan(self) -> Plan | None:
        """What the last taken decision proposed; before it, what ran at the start."""
        with self._lock:
            return self._plan

    @property
    def looks(self) -> tuple[Look, ...]:
        """All decisions so far, oldest first."""
        with self._lock:
            return tuple(self._looks)

    def step(self, finished: Iterable[Trajectory], running: Iterable[Trajectory]) -> Decision:
        """Decide on the plan of the next period.

        `finished` are the trajectories that have ended since the last call, `running` all that have not; their
        `policy_version` is the one they started with. Raises ValueError while nothing has ever finished, and what
        `Planner.plan` raises.
        """
        with self._lock:
            ended, going = list(finished), list(running)
            self._require_sound(ended, going)
            for trajectory in ended:
                self._tracker.observe(trajectory)
            self._tracker.observe_running(going)
            return self._decide()

    def _require_sound(self, finished: Sequence[Trajectory], running: Sequence[Trajectory]) -> None:
        """Refuse all of them before any is observed: what has been observed cannot be taken back."""
        longest = self._planner.recipe.max_length
        for trajectory, ended in (*((each, True) for each in finished), *((each, False) for each in running)):
            if trajectory.finished != ended:
                raise ValueError(
                    f"trajectory {trajectory.id} is {'' if trajectory.finished else 'un'}finished; give it as"
                    f" {'finished' if trajectory.finished else 'running'}"
                )
            if trajectory.peak_context > longest:
                raise ValueError(
                    f"trajectory {trajectory.id} holds {trajectory.peak_context} tokens, more than the recipe's"
                    f" max_length of {longest}: raise max_length, or cut it with libra.trajectory.truncate"
                )

    def realised(self, seconds_per_step: float) -> None:
        """The mean seconds of a step as measured since the last decision, whatever happened in them."""
        if not seconds_per_step > 0:
            raise ValueError(f"seconds_per_step is {seconds_per_step}; give the measured seconds, above 0")
        with self._lock:
            if not self._looks:
                raise ValueError("no decision has been made; call step() before realised()")
            self._looks[-1] = replace(self._looks[-1], realised=seconds_per_step)
            self._measured = seconds_per_step

    def _decide(self) -> Decision:
        held = self._plan
        current = None if held is None else held.allocation
        forecast = self._tracker.forecast(self._period / 2, CLASSES, self._planner.recipe.max_length)
        requests = sharing_layouts(self._requests(held, forecast))
        menus = [request.menu() for request in requests]
        cases = [Case(menu.problem, weight) for menu, (_, weight) in zip(menus, _NODES, strict=True)]
        solutions = [solve(case.problem) for case in cases]
        usable = [
            each.allocation
            for each in solutions
            if all(infeasibility(c.problem, each.allocation) is None for c in cases)
        ]
        if not usable:  # no engine shape serves all lengths that are possible: then the likeliest decide
            cases, usable = [replace(cases[0], weight=1.0)], [solutions[0].allocation]
        horizon, uncertainty = self._horizon(), _CONFIDENCE * self._tracker.work_uncertainty()
        switch, refill = self._switch or switch_cost(requests[0]), live_refill(requests[0])

        def cost(wanted: Allocation) -> float:
            return 0.0 if current is None else switch_seconds(cases[0].problem, current, wanted, switch, refill)

        proposed = min(usable, key=lambda wanted: expected(cases, wanted).step * horizon + cost(wanted))
        if current is None:
            reason = "nothing runs yet: the best plan is started"
            decision = Decision(None, expected(cases, proposed), (), None, horizon, 0.0, uncertainty, True, reason)
        else:
            decision = decide_over(
                cases, current, proposed, horizon_steps=horizon, uncertainty=uncertainty, cost=cost(proposed)
            )
        if decision.taken:
            self._plan = answer(
                requests[0],
                cases[0].problem,
                _compared(cases[0].problem, proposed, solutions[0]),
                layout=menus[0].layouts[_key(proposed)],
                placement=place(cases[0].problem, proposed, () if held is None else held.placement),
            )
        in_force = decision.proposed if decision.taken or decision.current is None else decision.current
        self._looks.append(Look(decision, in_force, self._measured))
        self._measured = None
        return decision

    def _requests(self, running: Plan | None, forecast: Forecast) -> list[ClusterRequest]:
        """The question for each of `_NODES`, for the work in the middle of the period to come."""
        longest = self._planner.recipe.max_length
        error = math.hypot(forecast.error, _UNSEEN)
        factors = [math.exp(deviations * error) for deviations, _ in _NODES]
        return [
            self._planner.request(tuple(scaled(cls, factor, longest) for cls in forecast.classes), *what_runs(running))
            for factor in factors
        ]

    def _horizon(self) -> float:
        """Steps for which a plan is expected to hold: as long as plans have so far, on average."""
        changes = sum(look.decision.taken and look.decision.current is not None for look in self._looks)
        steps = self._period * max(1, len(self._looks)) / (1 + changes)
        return min(float(self._planner.recipe.horizon), steps)


def _key(allocation: Allocation) -> tuple[str, int]:
    return allocation.layout, allocation.replicas


def _compared(problem: Problem, allocation: Allocation, best: Solution) -> Solution:
    """An allocation beside the best there is for the problem, which it may be or not."""
    if allocation == best.allocation:
        return best
    predicted = price(problem, allocation)
    return Solution(allocation, predicted, Proof("feasible", best.proof.bound, 1 - best.proof.bound / predicted.step))
