"""One simulated engine and what it did, in the same terms as the naive engine tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oracles.naive_engine import NaiveResult, Step, naive_run

from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.engine import SimEngine
from libra.sim.engine.iteration_cost import DecodeBatch, IterationCost
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Request
from libra.sim.workload.requests import Requests

Make = Callable[[], Sequence[Request]]  # new requests, the same each time


class Asked:
    """A simulator's cost, for the naive engine: every iteration is asked for, none is taken from a line."""

    def __init__(self, cost: IterationCost) -> None:
        self._cost = cost

    def decode(self, sequences: int, context: int) -> int:
        """An iteration that schedules nothing takes no time: vLLM calls its scheduler again at once."""
        if not sequences:
            return 0
        base, slope, limit = self._cost.line(DecodeBatch(sequences), context)
        assert context < limit
        return base + slope * context

    def mixed(self, sequences: int, context: int, chunks: list[tuple[int, int]]) -> int:
        return self._cost.mixed(DecodeBatch(sequences), context, chunks)


class Ended(Requests):
    """An open loop that remembers in which order its requests came to their ends."""

    def __init__(self, make: Make) -> None:
        super().__init__(lambda: sorted(make(), key=lambda request: (request.arrival, request.number)), {})
        self.order: list[int] = []

    def finished(self, request: Request, now: int) -> None:
        self.order.append(request.number)


@dataclass(frozen=True, slots=True)
class Run:
    """What one engine did with its requests."""

    engine: SimEngine
    requests: dict[int, Request]  # by number
    iterations: tuple[Iteration, ...]
    order: tuple[int, ...]  # in which they ended

    @property
    def steps(self) -> tuple[Step, ...]:
        """The iterations as the naive engine's steps. Whoever ended at the end of one that it was in, finished; who was
        given up meanwhile is left out, for nobody was told when its last token came."""
        made = []
        for iteration in self.iterations:
            scheduled = {number for number, _ in iteration.scheduled}
            finished = tuple(
                number
                for number in self.order
                if number in scheduled
                and self.requests[number].status == "finished"
                and self.requests[number].finish == iteration.end
                and not _given_up(self.requests[number], iteration.end)
            )
            made.append(
                Step(
                    iteration.start,
                    iteration.end,
                    iteration.scheduled,
                    iteration.preempted,
                    iteration.cached,
                    finished,
                    iteration.free_blocks,
                )
            )
        return tuple(made)

    @property
    def result(self) -> NaiveResult:
        return NaiveResult(
            times={number: (it.first_token, _tick(it.finish)) for number, it in self.requests.items()},
            statuses={number: it.status for number, it in self.requests.items()},
            cached={number: it.cached_tokens for number, it in self.requests.items() if it.scheduled is not None},
            preemptions={number: it.preemptions for number, it in self.requests.items()},
            generated={number: it.generated for number, it in self.requests.items()},
            steps=self.steps,
        )


def simulate(config: EngineConfig, cost: IterationCost, make: Make, *, exact: bool = False) -> Run:
    """Serve the requests on one engine until all have ended, watching every iteration."""
    iterations: list[Iteration] = []
    workload = Ended(make)
    cluster = SimCluster([EngineSpec("engine", config, cost)], workload, exact=exact, trace=iterations.append)
    cluster.run()
    assert not cluster.partial
    requests = {request.number: request for request in sorted(cluster.requests, key=lambda request: request.number)}
    return Run(cluster.engines[0], requests, tuple(iterations), tuple(workload.order))


def assert_visited_alike(config: EngineConfig, cost: IterationCost, make: Make) -> None:
    """Iterations counted together are as if every one was visited, and the same becomes of every request."""
    compressed, visited = (simulate(config, cost, make, exact=exact) for exact in (False, True))
    assert compressed.iterations == visited.iterations
    assert compressed.result == visited.result
    assert compressed.order == visited.order
    assert compressed.engine.events <= visited.engine.events
    for run in (compressed, visited):
        assert run.engine.pool.free == config.kv_blocks
        assert run.engine.busy_ticks == sum(it.end - it.start for it in run.iterations)
        assert run.engine.load_tokens == 0


def naive(config: EngineConfig, cost: IterationCost, make: Make) -> NaiveResult:
    """The same of the naive engine."""
    requests = {request.number: request for request in make()}
    result = naive_run(config, Asked(cost), list(requests.values()))
    steps = tuple(
        replace(step, finished=tuple(it for it in step.finished if not _given_up(requests[it], step.end)))
        for step in result.steps
    )
    return replace(result, steps=steps)


def _given_up(request: Request, tick: int) -> bool:
    return request.cancel_at is not None and request.cancel_at < tick


def _tick(tick: int | None) -> int:
    assert tick is not None
    return tick
