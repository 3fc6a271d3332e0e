"""Quality of published routing rules on a workload.

Invariant: they are judged over a whole run, drift included, from its second step on: the first one teaches them.
"""

from __future__ import annotations

from benchmarks.workloads.definition import Workload
from benchmarks.workloads.routing_quality import Quality, evaluate, static_fleet
from libra.route.catalogue import policy_named
from libra.sim.training_run.episodes import Episodes
from libra.trajectory import Trajectory

# Single-shot routing accuracy on Search-R1, Libra, arXiv 2606.03077.
PUBLISHED = {"mlfq": 0.448, "length-predictor": 0.652, "cmlfq-published": 0.911}

# Room for one turn. The engines here hold their bucket's limit and this, so it decides nothing but ties.
TURN_TOKENS = 2_048


def whole_run(workload: Workload, episodes: Episodes) -> list[Trajectory]:
    """All trajectories of a run of the workload's steps, in order; each step generates with the version before it."""
    numbers = range(workload.steps * workload.groups_per_step)
    return [each for number in numbers for each in episodes.group(number, number // workload.groups_per_step)]


def quality(workload: Workload, episodes: Episodes, policy: str) -> Quality:
    """Quality of a named policy over a whole run in which all of a step's trajectories are in flight together."""
    step = workload.groups_per_step * episodes.samples_per_prompt
    fleet = static_fleet(workload.limits, turn_tokens=TURN_TOKENS)
    return evaluate(policy_named(policy), whole_run(workload, episodes), fleet, batch=step, warm_up=step)
