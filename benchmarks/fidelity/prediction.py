"""Workloads as the simulator serves them: at fitted prices, or at the times that steps of a real engine took.

Invariant: both ways run the simulator that the package ships, on the sessions and the engine settings that the real
engines were given. A prediction sees prices and nothing that was measured of a workload; a replay sees how long each
step took and nothing else, so where it differs, a rule is wrong, not a price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.fidelity.measured import Run
from benchmarks.fidelity.sessions import Sessions
from benchmarks.fidelity.step import Step
from benchmarks.fidelity.summary import Outcome, outcomes
from benchmarks.fidelity.workloads import Workload
from libra.route.baselines import RoundRobin
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineSpec
from libra.sim.engine.iteration_cost import NONE_ADMITTED, UNLIMITED, Admitted, Chunk, DecodeBatch, IterationCost

_Composition = tuple[int, int, tuple[Chunk, ...]]  # sequences that decode, what they attend to, prefill chunks


def predict(workload: Workload, cost: IterationCost) -> tuple[Outcome, ...]:
    """Outcomes of a workload's requests at these prices."""
    return _simulate(workload, [cost] * workload.engines, exact=False)


def replay_difference(workload: Workload, run: Run) -> str | None:
    """Serve a workload with steps as long as they were, and say what comes first that the real engines did otherwise.

    None: every step computes the same chunks in the same order, and every request has the same times, engine, cached
    tokens and preemptions.
    """
    costs = [_Taken(_with_work(run.steps, number)) for number in range(workload.engines)]
    served = _simulate(workload, costs, exact=True)
    for number, cost in enumerate(costs):
        found = cost.difference()
        if found is not None:
            return f"{workload.name}, engine {number}, {found}"
    for ours, theirs in zip(served, run.outcomes, strict=True):
        if ours != theirs:
            return f"{workload.name}: simulated {ours}, measured {theirs}"
    return None


class _Taken:
    """`IterationCost` of one engine whose iterations are asked for one by one: each takes what the real step took."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._asked = 0
        self._difference: str | None = None

    @property
    def uneven(self) -> bool:
        return False

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        return self._take((batch.requests, context, ())), 0, UNLIMITED

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        return self._take((batch.requests, context, tuple(chunks)))

    def difference(self) -> str | None:
        """The first one so far, once all is over."""
        if self._difference is None and self._asked != len(self._steps):
            return f"the simulated engine took {self._asked} steps, the real one {len(self._steps)}"
        return self._difference

    def _take(self, simulated: _Composition) -> int:
        number, self._asked = self._asked, self._asked + 1
        if number >= len(self._steps):
            return 1  # however long: there is a difference already
        step = self._steps[number]
        measured = (step.decodes, step.attended, step.chunks)
        if self._difference is None and simulated != measured:
            self._difference = f"step {number}: simulated {simulated}, measured {measured}"
        return step.adding + step.duration


def _with_work(steps: Sequence[Step], engine: int) -> list[Step]:
    """An engine's steps that compute something. One that only preempts takes the simulator no time: what it took is
    taken to be the next one's."""
    made, before = [], 0
    for step in steps:
        if step.engine != engine:
            continue
        if step.decodes or step.chunks:
            made.append(replace(step, duration=before + step.duration))
            before = 0
        else:
            before += step.adding + step.duration
    return made


def _simulate(workload: Workload, costs: Sequence[IterationCost], *, exact: bool) -> tuple[Outcome, ...]:
    config = workload.engine.config()
    engines = [EngineSpec(f"engine-{number}", config, cost) for number, cost in enumerate(costs)]
    cluster = SimCluster(engines, Sessions(workload), RoundRobin(sticky=False), exact=exact)
    cluster.run()
    return outcomes(cluster.requests)
