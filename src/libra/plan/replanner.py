"""Keeps a simulated or real training loop on a plan that fits its present trajectories.

Invariant: every decision uses the run's own trajectories (finished ones, and the known part of running ones), and
prices corrected by the run's own steps. A replanner starts no process and waits only for its solver; the loop carries
out the moves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from libra.cost.device import SwitchCost
from libra.lengths import LengthForecast, LengthTracker
from libra.lengths.forecast import scaled
from libra.plan.decision import Decision, decide, expected
from libra.plan.loan import loan_cases, solve_loans
from libra.plan.model.solve import solve
from libra.plan.options.menu import LendingPool
from libra.plan.options.price import infeasibility, price, solution
from libra.plan.plan import Plan
from libra.plan.planner import Planner, recipe_tracker
from libra.plan.price_bias import FRESH, PeriodSeconds, PriceBias, measured_mean
from libra.plan.simulated import SimulatedGain
from libra.plan.site import ClusterSite, Scenario, Site
from libra.plan.solution import Prediction
from libra.trajectory import Trajectory

# Half-life of a trajectory's weight. With a shorter half-life, near-equal plans alternate because of noise. After the
# tracker detects a change, it forgets four times as fast.
REPLANNER_HALF_LIFE_STEPS = 12.0
# Assumed relative change of lengths within a period that no trend shows yet. If its longest trajectories
# become a tenth longer, a plan without slack may need several times as long.
_UNSEEN = 0.1
_CONFIDENCE = 2.0  # standard errors of the tracked work that a gain must exceed: 95 % of errors are smaller
# The error of a forecast is normal in the logarithm. The mean of a price is taken at three points
# (Gauss-Hermite quadrature): pairs of a distance from the forecast, in standard errors, and a weight.
_NODES = ((0.0, 2 / 3), (-math.sqrt(3), 1 / 6), (math.sqrt(3), 1 / 6))
_REHEARSED = 4  # latest batches whose trajectories are used to simulate a change

# (current plan, proposed plan, finished trajectories) -> gain, such as `libra.choose.confirmation.simulated_gain`.
Rehearse = Callable[[Plan, Plan, Sequence[Trajectory]], SimulatedGain]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A solved plan and the decision on it. The plan's prediction is for the forecast lengths."""

    plan: Plan
    decision: Decision

    def rehearsed(self, gain: SimulatedGain) -> Proposal:
        """The proposal after simulation, which makes the change only if it also saves more than it costs in
        simulation.
        """
        decision = self.decision
        found = f"{gain.seconds:.4g} +- {gain.error:.4g} s a step over {gain.steps} simulated steps"
        saved = gain.seconds * decision.horizon_steps
        if gain.seconds <= gain.error:
            reason = f"{decision.reason}; simulation does not confirm it: {found}"
        elif saved <= decision.cost:
            reason = (
                f"{decision.reason}; in simulation the change saves {found}, {saved:.4g} s within "
                f"{decision.horizon_steps:.4g} steps, and costs {decision.cost:.4g} s"
            )
        else:
            return replace(self, decision=replace(decision, reason=f"{decision.reason}; simulated: {found}"))
        return replace(self, decision=replace(decision, reason=reason, taken=False))


@dataclass(frozen=True, slots=True)
class Look:
    """One decision, and the step measured after it."""

    decision: Decision
    realised: float | None = None  # measured seconds of a step since; None: not yet

    @property
    def settled(self) -> bool:
        """Whether the steps since the decision can be compared with prices, as no roles changed."""
        return not self.decision.taken


@dataclass(frozen=True, slots=True)
class Outlook:
    """The basis of a decision: a site, the possible future work, and the expected lifetime of a plan."""

    site: Site
    scenarios: tuple[Scenario, ...]  # the forecast, then the forecast with its possible errors
    horizon_steps: float
    uncertainty: float  # relative error of the tracked work that a gain has to exceed
    bias: PriceBias  # of prices, learned from the run

    def propose(self, seed: int = 0) -> Proposal:
        """Solve for each scenario, and compare the gain of the best plan with the cost of the change. Reads only
        immutable values; the solver takes most of the time. Raises `InfeasiblePlanError` if a scenario has no plan.
        """
        site = self.site
        questions = site.questions(self.scenarios)
        cases = [
            case
            for question, (_, weight) in zip(questions, _NODES, strict=True)
            for case in loan_cases(question.menu, weight)
        ]
        solutions = [solve_loans(question.menu, lambda problem: solve(problem, seed=seed)) for question in questions]
        usable = [
            each.allocation for each in solutions if all(case.infeasibility(each.allocation) is None for case in cases)
        ]
        if not usable:  # none of the plans serves all cases: use only the likeliest scenario
            cases, usable = list(loan_cases(questions[0].menu)), [solutions[0].allocation]
        transitions = [site.transition(questions[0], wanted) for wanted in dict.fromkeys(usable)]
        costs = [0.0 if site.current is None else site.seconds(questions[0], each) for each in transitions]
        transition, cost = min(
            zip(transitions, costs, strict=True),
            key=lambda way: expected(cases, way[0].after, self.bias).step * self.horizon_steps + way[1],
        )
        decision = decide(
            cases,
            transition,
            horizon_steps=self.horizon_steps,
            uncertainty=self.uncertainty,
            cost=cost,
            bias=self.bias,
        )
        likeliest, best = questions[0], solutions[0]
        if transition.after != best.allocation:
            best = solution(likeliest.problem, transition.after, best.proof.bound)
        return Proposal(site.plan(likeliest, best), decision)


class Replanner:
    """Decides every `period` steps whether to change the plan: `Replanner(planner, plan).step(finished, running)`.

    A change must earn back its cost within the mean lifetime of plans so far. Prices assume the recipe's router hit
    rate for all ranges. A loop with changing devices or measured costs provides its own `Site`: it calls `observe`,
    then `outlook` with the site, and reports the proposal's decision with `decided`.

    A replanner and its tracker belong to one thread. Results are immutable, so another thread may search:
    `outlook(site).propose()`.
    """

    def __init__(
        self,
        planner: Planner | None = None,
        plan: Plan | None = None,
        *,
        period: int = 1,
        switch: SwitchCost | None = None,
        tracker: LengthTracker | None = None,
        holds: float | None = None,
        rehearse: Rehearse | None = None,
    ) -> None:
        """Create a replanner.

        `plan` is the running plan; without it, the first decision starts the best plan. `switch` has measured role
        changes; the default is the assumption of `libra.plan.decision`. An existing `tracker` keeps its history;
        without a planner it is required. `holds` is the initial estimate of a plan's lifetime, in steps; None: one
        period. With `rehearse`, each change is first simulated with the latest finished trajectories, and made only if
        it also saves time in simulation.
        """
        if period < 1:
            raise ValueError(f"period is {period}; it is a number of steps between two decisions, 1 or more")
        self._planner, self._period, self._switch = planner, period, switch
        self._holds = float(period) if holds is None else holds
        self._plan = plan
        self._looks: list[Look] = []
        self._bias = FRESH
        if tracker is None:
            if planner is None:
                raise ValueError("planner and tracker are missing: give one of them")
            tracker = recipe_tracker(planner.recipe, REPLANNER_HALF_LIFE_STEPS)
            tracker.observe_running(())  # makes the tracker weigh evidence by start version
        self._tracker = tracker
        self._rehearse = rehearse
        latest = 0 if rehearse is None or planner is None else _REHEARSED * planner.recipe.batch
        self._latest: deque[Trajectory] = deque(maxlen=latest)  # finished trajectories

    @property
    def plan(self) -> Plan | None:
        """The plan of the last change; before any change, the initial plan."""
        return self._plan

    @property
    def looks(self) -> tuple[Look, ...]:
        """All decisions so far, oldest first."""
        return tuple(self._looks)

    @property
    def bias(self) -> PriceBias:
        """Learned bias of prices."""
        return self._bias

    @property
    def tracker(self) -> LengthTracker:
        """The tracker of all observed trajectories."""
        return self._tracker

    def step(self, finished: Iterable[Trajectory], running: Iterable[Trajectory]) -> Decision:
        """Decide on the plan of the next period.

        `finished` has the trajectories that have ended since the last call, `running` all others; `policy_version` is
        the version at their start. Raises ValueError until a trajectory has finished, and the errors of `Planner.plan`.
        """
        if self._planner is None:
            raise ValueError("there is no planner; call outlook() for the site instead of step()")
        ended, going = list(finished), list(running)
        _require_sound(ended, going, self._planner.recipe.max_length)
        for trajectory in ended:
            self._tracker.observe(trajectory)
        self._latest.extend(ended)
        self._tracker.observe_running(going)
        site = ClusterSite(self._planner, self._plan, self._switch)
        self._learn_from_last(site)
        proposal = self.outlook(site).propose()
        changes = proposal.decision.taken and proposal.decision.current is not None
        if changes and self._plan is not None and self._rehearse is not None and self._latest:
            proposal = proposal.rehearsed(self._rehearse(self._plan, proposal.plan, tuple(self._latest)))
        self.decided(proposal)
        return proposal.decision

    def observe(self, finished: Iterable[Trajectory]) -> None:
        """Observe trajectories that have ended since the last call."""
        for trajectory in finished:
            self._tracker.observe(trajectory)

    def lend(self, lenders: Sequence[LendingPool]) -> None:
        """Replace the lenders of the planner's serving pools for the coming period. The caller makes `lenders` from the
        latest traffic forecast. Later decisions use only the device time that this traffic leaves. Raises ValueError
        if there is no planner, or if the pools are not the planner's.
        """
        if self._planner is None:
            raise ValueError("there is no planner; the site of outlook() has its own lenders")
        pools = [lender.pool for lender in lenders]
        if pools != [lender.pool for lender in self._planner.lenders]:
            known = ", ".join(lender.pool for lender in self._planner.lenders)
            raise ValueError(
                f"lenders are for {', '.join(pools) or 'no pool'}; give one for each of the planner's: {known}"
            )
        self._planner = replace(self._planner, lenders=tuple(lenders))

    def realised(self, seconds_per_step: float) -> None:
        """Report the measured mean seconds per step since the last decision. The next `step` uses it to correct prices,
        unless the decision changed the plan.
        """
        if not seconds_per_step > 0:
            raise ValueError(f"seconds_per_step is {seconds_per_step}; give the measured seconds, above 0")
        if not self._looks:
            raise ValueError("no decision has been made; call step() before realised()")
        self._looks[-1] = replace(self._looks[-1], realised=seconds_per_step)

    def learn(self, priced: Prediction, found: PeriodSeconds, *, untried: bool = False) -> None:
        """Learn the price bias from a period in which no role changed.

        `priced` is the uncorrected price of the period's allocation, for the lengths and speeds measured in this
        period. With an earlier price, changes of lengths and speeds would count as price errors. `untried`: the
        allocation differs from that of the last settled period.
        """
        self._bias = self._bias.learned(priced, found, untried=untried)

    def _learn_from_last(self, site: ClusterSite) -> None:
        """Learn from the period since the last decision, if it was settled and measured."""
        look = self._looks[-1] if self._looks else None
        if look is None or look.realised is None or not look.settled or site.current is None:
            return
        [question] = site.questions([self.scenario(site)])
        if infeasibility(question.problem, site.current) is None:
            untried = len(self._looks) > 1 and not self._looks[-2].settled
            found = measured_mean(look.realised, self._period)
            self.learn(price(question.problem, site.current), found, untried=untried)

    def scenario(self, site: Site) -> Scenario:
        """The tracked lengths in the site's classes."""
        return Scenario(self._tracker.classes(site.classes), 1.0)

    def forecast(self, site: Site) -> Scenario:
        """The lengths forecast for the middle of the coming period."""
        forecast = self._forecast(site)
        return Scenario(forecast.classes, forecast.scale)

    def _forecast(self, site: Site) -> LengthForecast:
        return self._tracker.forecast(self._period / 2, site.classes, site.longest_context)

    def outlook(self, site: Site, steps_left: float = math.inf) -> Outlook:
        """The present basis of a decision about the site. Raises ValueError until a trajectory has finished."""
        longest, forecast = site.longest_context, self._forecast(site)
        error = math.hypot(forecast.error, _UNSEEN)
        factors = [math.exp(deviations * error) for deviations, _ in _NODES]
        return Outlook(
            site,
            tuple(
                Scenario(tuple(scaled(cls, factor, longest) for cls in forecast.classes), forecast.scale * factor)
                for factor in factors
            ),
            min(self._horizon(), site.horizon, steps_left),
            _CONFIDENCE * self._tracker.work_uncertainty(),
            self._bias,
        )

    def decided(self, proposal: Proposal) -> None:
        """Record the decision of a proposal. If the change is made, its plan becomes the current plan."""
        decision = proposal.decision
        if decision.taken:
            self._plan = proposal.plan
        self._looks.append(Look(decision))

    def _horizon(self) -> float:
        """Expected lifetime of a plan in steps: the mean lifetime of plans so far."""
        changes = sum(look.decision.taken and look.decision.current is not None for look in self._looks)
        return max(self._holds, self._period * len(self._looks)) / (1 + changes)


def _require_sound(finished: Sequence[Trajectory], running: Sequence[Trajectory], longest: int) -> None:
    """Check all trajectories before the first observation, since an observation cannot be undone."""
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
