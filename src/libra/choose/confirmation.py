"""A change of plans, tried in simulation before it is made.

Invariant: both plans run on the same draws, and each begins with a router that has learned the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic

from libra.choose.choice import Effort
from libra.choose.intervals import mean_and_error
from libra.choose.rehearsal import Rehearsals
from libra.plan.plan import Plan
from libra.plan.simulated import SimulatedGain
from libra.route.catalogue import policy_named
from libra.route.policy import Policy
from libra.sim.of_plan import teach
from libra.trajectory import Trajectory

_LEAST, _MOST = 3, 8  # pairs of samples


def simulated_gain(
    current: Plan,
    proposed: Plan,
    log: Sequence[Trajectory],
    *,
    router: Policy | None = None,
    effort: Effort | None = None,
) -> SimulatedGain:
    """Seconds of a step that `proposed` saves over `current` in whole runs of both, on groups drawn from `log`.

    Pairs of samples are made until their 95 % interval leaves out 0, eight at most; after three no more than there is
    time for. `router` is a policy that has learned nothing yet, by default the one that the recipe names. Raises
    ValueError as `libra.sim.of_plan.run_of`.
    """
    effort = Effort() if effort is None else effort
    policy = policy_named(proposed.of_cluster.recipe.router, seed=effort.seed) if router is None else router
    finished = [trajectory for trajectory in log if trajectory.finished]
    teach(policy, finished)
    until = monotonic() + effort.seconds
    with Rehearsals((current, proposed), finished, policy, seed=effort.seed, jobs=effort.jobs) as runs:
        mean, error, pairs = 0.0, inf, 0
        while pairs < _LEAST or (pairs < _MOST and abs(mean) <= error and monotonic() < until):
            pairs = max(_LEAST, pairs + 1)
            samples = dict(runs.upto({0: pairs, 1: pairs}))
            mean, known = mean_and_error([a - b for a, b in zip(samples[0], samples[1], strict=True)])
            error = inf if known is None else known
        return SimulatedGain(mean, error, pairs * runs.steps_a_sample)
