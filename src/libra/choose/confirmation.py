"""Simulates a change of plans before it is made.

Invariant: both plans run on the same draws, and both routers begin with the same learned state.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from libra.choose.effort import Effort
from libra.choose.expectation import expected_steps
from libra.choose.race import race
from libra.choose.rehearsal import Rehearsals
from libra.plan.options.price import infeasibility, solution
from libra.plan.plan import Plan
from libra.plan.simulated import SimulatedGain
from libra.plan.solution import Solution
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.of_plan import teach
from libra.trajectory import Trajectory


def simulated_gain(
    current: Plan,
    proposed: Plan,
    log: Sequence[Trajectory],
    *,
    router: Policy | None = None,
    effort: Effort | None = None,
) -> SimulatedGain:
    """Seconds per step that `proposed` saves over `current`, from prices and from simulated runs on groups drawn from
    `log`.

    `choose_plan` ranks plans by the same difference (`race.Standings.gap`). Pairs of samples are drawn until the gain
    is clearly nonzero or certainly negligible, within the effort. `router` is an untrained policy, by default the
    recipe's. Raises ValueError like `libra.sim.of_plan.run_of`.
    """
    effort = Effort() if effort is None else effort
    policy = policy_named(proposed.of_cluster.recipe.router, seed=effort.seed) if router is None else router
    finished = [trajectory for trajectory in log if trajectory.finished]
    teach(policy, finished)
    until = monotonic() + effort.seconds
    with Rehearsals((current, proposed), finished, policy, seed=effort.seed, jobs=effort.jobs) as runs:
        standings = race(
            runs,
            expected_steps([_for_the_same(current, proposed), proposed.solution]),
            first=runs.fewest,
            most=effort.samples,
            time_left=lambda: monotonic() < until,
        )
    gain = standings.gap(0, 1)
    return SimulatedGain(gain.seconds, gain.error, len(standings.samples[1]) * runs.steps_a_sample)


def _for_the_same(current: Plan, proposed: Plan) -> Solution:
    """The current plan with a price for the work of the proposed plan, since its own prediction may be for other
    lengths. If the plan does not fit this work, its own prediction is used.
    """
    problem = proposed.of_cluster.menu().problem
    if infeasibility(problem, current.allocation) is not None:
        return current.solution
    return solution(problem, current.allocation)
