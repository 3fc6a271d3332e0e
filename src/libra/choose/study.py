"""Comparison of routing policies on the same work: engines, or whole runs of a plan.

Invariant: a seed draws the same trajectories for all policies, and each policy starts untrained, so differences are
paired. Values are simulated seconds; smaller is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Protocol

from libra.choose.forked import mapping
from libra.choose.intervals import mean_and_error
from libra.choose.rehearsal import Rehearsals
from libra.plan.plan import Plan
from libra.route.custom import load_policy
from libra.route.policy import Policy
from libra.sim.deployment import Deployment
from libra.sim.of_plan import teach
from libra.sim.outcome.metrics import metrics_of
from libra.sim.simulate import simulate
from libra.sim.workload.replay import Replay, draw
from libra.trajectory import Trajectory


class Subject(Protocol):
    """Work that a policy routes."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values that a run returns."""
        ...

    def run(self, router: str, seed: int) -> tuple[float, ...]:
        """Seconds of each metric. Raises ValueError if the router or a trajectory does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class WholeRuns:
    """Whole runs of a plan. `steps` optimiser steps count; the first steps, which begin with idle engines, do not."""

    plan: Plan
    log: tuple[Trajectory, ...]  # groups are drawn from its finished trajectories
    learned: tuple[Trajectory, ...]  # trajectories from which the policy learns before a run
    steps: int

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("step",)

    def run(self, router: str, seed: int) -> tuple[float, ...]:
        with Rehearsals([self.plan], self.log, _taught(router, seed, self.learned), seed=seed) as runs:
            samples = max(1, -(-self.steps // runs.steps_a_sample))
            [(_, seconds)] = runs.upto({0: samples})
        return (fmean(seconds),)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Engines of a file. They run as many trajectories as the log has, drawn from the log with replacement."""

    deployment: Deployment
    log: tuple[Trajectory, ...]
    learned: tuple[Trajectory, ...]
    concurrency: int | None = None  # limit on trajectories in flight; None: no limit

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("makespan", "mean trajectory")

    def run(self, router: str, seed: int) -> tuple[float, ...]:
        its = self.deployment
        drawn = draw(self.log, len(self.log), seed, same_prompts=False, replaced=True)
        result = simulate(
            its.engines,
            Replay(drawn, concurrency=self.concurrency),
            _taught(router, seed, self.learned),
            limits=its.limits,
            turn_tokens=its.turn_tokens,
            updates=its.updates,
            kv_transfer=its.kv_transfer,
            decode_route=its.decode_policy(seed),
        )
        found = metrics_of(result)
        if found.trajectory_latency is None:
            raise ValueError("no trajectory was completed; give engines that hold the trajectories")
        return found.makespan, found.trajectory_latency.mean


@dataclass(frozen=True, slots=True)
class Study:
    """Seconds of all policies for all seeds. `seconds[policy][metric]` has a value for each seed."""

    metrics: tuple[str, ...]
    policies: tuple[str, ...]  # the first policy is the baseline of all others
    seeds: tuple[int, ...]
    seconds: tuple[tuple[tuple[float, ...], ...], ...]

    def mean(self, policy: int, metric: int) -> tuple[float, float | None]:
        """The mean, and half of its 95 % interval; the half is None for a single seed."""
        return mean_and_error(self.seconds[policy][metric])

    def over_first(self, policy: int, metric: int) -> tuple[float, float | None]:
        """Mean difference from the first policy, paired by seed, as a share of the first policy's mean; and half of the
        interval.
        """
        first = self.seconds[0][metric]
        scale = fmean(first)
        pairs = zip(self.seconds[policy][metric], first, strict=True)
        return mean_and_error([(its - other) / scale for its, other in pairs])


def compare_policies(
    subject: Subject,
    policies: Sequence[str],
    seeds: Sequence[int],
    jobs: int = 1,
    tell: Callable[[str], None] = lambda _: None,
) -> Study:
    """Run each policy with each seed, `jobs` runs at a time. Raises ValueError like `Subject.run`, and if a policy is
    unknown or named twice."""
    twice = next((it for it in policies if list(policies).count(it) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice; name each policy once")
    for name in policies:
        load_policy(name)
    cells = [(policy, seed) for seed in seeds for policy in policies]
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    # The subject is not pickled, since engines hold caches of their times.
    with mapping(partial(_run, subject), jobs) as runs:
        for number, (cell, its) in enumerate(zip(cells, runs(cells), strict=True), start=1):
            found[cell] = its
            tell(f"{number} of {len(cells)} runs: {cell[0]}, seed {cell[1]}")
    seconds = tuple(
        tuple(tuple(found[policy, seed][metric] for seed in seeds) for metric in range(len(subject.metrics)))
        for policy in policies
    )
    return Study(subject.metrics, tuple(policies), tuple(seeds), seconds)


def _run(subject: Subject, cell: tuple[str, int]) -> tuple[float, ...]:
    return subject.run(*cell)


def _taught(router: str, seed: int, learned: Sequence[Trajectory]) -> Policy:
    policy = load_policy(router, seed=seed)
    teach(policy, learned)
    return policy
