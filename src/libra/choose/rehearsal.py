"""Simulations of whole runs of several plans.

Invariant: all runs draw the same groups of trajectories in the same order, and each begins with its own copy of one
policy. A run continues from its last step, so no step is simulated twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from typing import Self

from libra.choose.forked import Fork
from libra.plan.plan import Plan
from libra.route.policy import Policy
from libra.sim.of_plan import run_of
from libra.sim.training_run.loop import PosttrainingRun
from libra.trajectory import Trajectory

_LEAST_STEPS = 2  # steps of a first round, without the omitted ones
_LONGEST = 100_000  # limit on the steps of a run, more than any rehearsal needs


def unsettled_steps(staleness: int) -> int:
    """Number of steps at the beginning of a run that differ from later steps: engines are idle at first, and the
    batches in flight are not spread yet. 0 with one batch at a time.
    """
    return 2 * (1 + staleness) if staleness else 0


class Rehearsals:
    """Runs of `plans` on groups drawn from a log with `seed`: a `race.Sampler` whose samples are seconds of a step.

    A sample is the mean over 1 + staleness steps, one for each batch in flight, since steps of overlapping batches
    alternate. If staleness is above 0, the first `unsettled_steps` are omitted. With `jobs` > 1, each run is a forked
    process, and `jobs` runs are simulated at a time. As a context manager, it ends its processes. Raises ValueError
    like `run_of`.
    """

    def __init__(
        self, plans: Sequence[Plan], log: Sequence[Trajectory], policy: Policy, *, seed: int = 0, jobs: int = 1
    ) -> None:
        self._runs: list[Callable[[], PosttrainingRun]] = [
            cache(lambda plan=plan: run_of(plan, log, _LONGEST, deepcopy(policy), seed=seed)) for plan in plans
        ]
        staleness = {plan.of_cluster.staleness for plan in plans}
        if len(staleness) != 1:
            raise ValueError(f"plans have staleness {sorted(staleness)}; rehearse plans of one staleness")
        (stale,) = staleness
        self.steps_a_sample = 1 + stale
        self.fewest = -(-_LEAST_STEPS // self.steps_a_sample)  # number of samples of a first round
        self.left_out = unsettled_steps(stale)
        self._jobs = min(jobs, len(plans))
        self._forks: list[Fork[int, tuple[float, ...]]] = []

    def __enter__(self) -> Self:
        if self._jobs > 1:
            self._forks = [Fork(partial(self._published, run)) for run in range(len(self._runs))]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._forks:
            worker.end()

    def upto(self, wanted: Mapping[int, int]) -> Generator[tuple[int, tuple[float, ...]], None, None]:
        """See `race.Sampler`; runs are in the order in which their samples are ready."""
        versions = {run: self.left_out + samples * self.steps_a_sample for run, samples in wanted.items()}
        published = self._in_processes(versions) if self._forks else self._here(versions)
        for run, times in published:
            yield run, self._samples(times)

    def _samples(self, published: Sequence[float]) -> tuple[float, ...]:
        began, each = self.left_out, self.steps_a_sample
        times = (0.0, *published)
        return tuple((times[k + each] - times[k]) / each for k in range(began, len(published), each))

    def _published(self, run: int, version: int) -> tuple[float, ...]:
        return self._runs[run]().published(version)

    def _here(self, versions: Mapping[int, int]) -> Generator[tuple[int, tuple[float, ...]], None, None]:
        for run, version in versions.items():
            yield run, self._published(run, version)

    def _in_processes(self, versions: Mapping[int, int]) -> Generator[tuple[int, tuple[float, ...]], None, None]:
        left = deque(versions.items())
        busy: dict[Connection, int] = {}
        while left or busy:
            while left and len(busy) < self._jobs:
                run, version = left.popleft()
                self._forks[run].ask(version)
                busy[self._forks[run].connection] = run
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                run = busy.pop(ready)
                yield run, self._answer(run, versions[run])

    def _answer(self, run: int, version: int) -> tuple[float, ...]:
        """Times of the versions up to `version`, in seconds. Skips answers for which the race no longer waits."""
        times: tuple[float, ...] = ()
        while len(times) != version:
            times = self._forks[run].answer()
        return times
