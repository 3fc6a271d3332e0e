"""A synchronous rollout of a case, and steps of its whole post-training run, simulated.

Invariant: the router of the rollout knows every length, so what differs from the price is what the price leaves out.
That of a run has learned from what the planner has seen, and from nothing that is simulated; engines, trainers,
staleness and times are the plan's, and training takes what the very lengths of each batch cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from benchmarks.evaluation.oracle import Oracle
from benchmarks.rollout_price_cases import Case
from benchmarks.rollout_price_plan import taught_router
from libra.plan.plan import Plan
from libra.sim.clock import seconds
from libra.sim.cluster import SimCluster
from libra.sim.planned_engines import planned_engines
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.outcome import SimulatedStep
from libra.sim.training_run.system import System
from libra.sim.workload.replay import Replay
from libra.trajectory import Trajectory

# The first batches, one more than the staleness, all start together. `_PERIODS` times their number of steps are
# measured, at least `_LEAST`, so that whatever they do in turn is done equally often. The same number of steps follows,
# so that no measured step has engines with less to do because no later batches start.
_PERIODS, _LEAST = 6, 12


@dataclass(frozen=True, slots=True)
class Steps:
    """Outcome of the measured steps."""

    seconds: float  # of a step, mean
    each: tuple[float, ...]  # seconds of the steps, one by one
    training: float  # seconds of a step in which the trainer computes, mean


@dataclass(slots=True)
class CaseEpisodes:
    """The case's batches as groups, one after the other from `first` on; they do not drift."""

    case: Case
    first: int = 0
    samples_per_prompt: int = field(init=False)
    max_context: int = field(init=False)
    _batches: dict[int, tuple[Trajectory, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.samples_per_prompt = self.case.recipe.samples_per_prompt
        self.max_context = self.case.recipe.max_length

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        batch, position = divmod(number, self.case.recipe.prompts)
        if batch not in self._batches:
            self._batches[batch] = self.case.batch(self.first + batch)
        size = self.samples_per_prompt
        drawn = self._batches[batch][position * size : (position + 1) * size]
        return tuple(
            replace(trajectory, id=f"{number}/{sample}", prompt_id=str(number), policy_version=version)
            for sample, trajectory in enumerate(drawn)
        )


def roll_out(plan: Plan, batch: tuple[Trajectory, ...]) -> float:
    """Seconds until the last trajectory of the batch is finished; all begin at once, on empty engines that have their
    weights."""
    limits = tuple(bucket.up_to for bucket in plan.allocation.buckets)
    workload = Replay(batch)
    cluster = SimCluster(planned_engines(plan), workload, Oracle({it.id: it for it in batch}), limits=limits)
    cluster.run()
    if workload.completed != len(batch):
        raise RuntimeError(f"{len(batch) - workload.completed} trajectories did not finish: {workload.unfinished}")
    return max(seconds(request.finish or 0) for request in cluster.requests)


def measured_steps(staleness: int) -> tuple[int, int]:
    """Numbers of steps: those left out at the beginning, which start together, and those measured after them."""
    ahead = 1 + staleness
    return ahead, max(_LEAST, _PERIODS * ahead)


def simulate_steps(case: Case, plan: Plan, measured: int | None = None, first: int = 0) -> Steps:
    """Mean seconds of a step under the plan, its first ones left out. `measured` steps count, if not those of
    `measured_steps`; batches are those of the case from the `first` on."""
    episodes = CaseEpisodes(case, first)
    system = System(case.recipe.router, plan, lambda: taught_router(case))
    ahead, usual = measured_steps(case.recipe.staleness)
    count = usual if measured is None else measured
    steps = simulate_posttraining(system, episodes, ahead + count + ahead).steps[: ahead + count]
    each = tuple(_seconds(steps, ahead))
    return Steps(sum(each) / count, each, sum(step.training for step in steps[ahead:]) / count)


def _seconds(steps: tuple[SimulatedStep, ...], ahead: int) -> Iterator[float]:
    for before, step in zip(steps[ahead - 1 :], steps[ahead:], strict=False):
        yield step.ended - before.ended
