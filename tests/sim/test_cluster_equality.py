"""Several engines behind a router, in closed and open loops: jumping over iterations changes nothing that happens.

What is hard here is time between engines: one that was in the middle of a jump has to be where it would have been had
every iteration been visited, whenever a request, a cancellation, new weights or the end of the run comes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from libra.route.catalogue import POLICIES, policy_named
from libra.sim.clock import TICKS
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import (
    NONE_ADMITTED,
    UNLIMITED,
    Admitted,
    AffineCost,
    Chunk,
    DecodeBatch,
    IterationCost,
)
from libra.sim.engine.messages import Iteration
from libra.sim.engine.request import Chain, Request
from libra.sim.workload.replay import Replay
from libra.sim.workload.requests import Requests, Workload
from libra.trajectory import Trajectory, Turn

STEP = 100  # ticks: what the lattice is made of
LONGEST = 96  # tokens
LIMITS = (48, LONGEST)  # of two buckets


@dataclass(frozen=True)
class TwoPieces:
    """Dearer contexts beyond a knee."""

    knee: int

    @property
    def uneven(self) -> bool:
        return False

    def line(self, batch: DecodeBatch, context: int) -> tuple[int, int, int]:
        if context < self.knee:
            return 2 * STEP + batch.requests, 1, self.knee
        return STEP, 7, UNLIMITED

    def mixed(
        self, batch: DecodeBatch, context: int, chunks: Sequence[Chunk], admitted: Admitted = NONE_ADMITTED
    ) -> int:
        return 3 * STEP + batch.requests + context + sum(9 * new + before for new, before in chunks)


class Cancelling:
    """A workload of which every so-manieth request is given up some time after it arrives."""

    def __init__(self, workload: Workload, every: int, after: int) -> None:
        self._workload = workload
        self._every = every
        self._after = after

    def start(self) -> Iterable[Request]:
        return map(self._marked, self._workload.start())

    def finished(self, request: Request, now: int) -> Request | None:
        following = self._workload.finished(request, now)
        return None if following is None else self._marked(following)

    def describe(self) -> dict[str, Any]:
        return self._workload.describe()

    def _marked(self, request: Request) -> Request:
        if request.number % self._every == 0:
            request.cancel_at = request.arrival + self._after
        return request


@dataclass(frozen=True)
class Alone:
    """A request of an open loop in the making."""

    gap: int  # ticks after the one before
    prompt_tokens: int
    output_tokens: int
    priority: int
    shares: bool


@dataclass(frozen=True)
class Scenario:
    """Everything of a simulation but how it is run."""

    specs: tuple[EngineSpec, ...]
    policy: str
    sticky: bool
    trajectories: tuple[Trajectory, ...]  # none: an open loop of `alone`
    concurrency: int | None
    samples: int
    alone: tuple[Alone, ...]
    cancelled: tuple[int, int] | None  # every so-manieth request, so many ticks after it arrived
    updates: tuple[WeightUpdate, ...]
    time_limit: int | None

    def run(self, *, exact: bool) -> Outcome:
        iterations: list[Iteration] = []
        cluster = SimCluster(
            self.specs,
            self._workload(),
            policy_named(self.policy, sticky=self.sticky or "cmlfq" in self.policy, seed=7),
            limits=LIMITS,
            turn_tokens=4,
            updates=self.updates,
            time_limit=self.time_limit,
            exact=exact,
            trace=iterations.append,
        )
        cluster.run()
        return Outcome(cluster, iterations)

    def _workload(self) -> Workload:
        workload: Workload
        if self.trajectories:
            workload = Replay(self.trajectories, concurrency=self.concurrency, samples_per_prompt=self.samples)
        else:
            workload = Requests(self._requests, {})
        return workload if self.cancelled is None else Cancelling(workload, *self.cancelled)

    def _requests(self) -> list[Request]:
        trunk = Chain("trunk")
        made, now = [], 0
        for number, it in enumerate(self.alone):
            now += it.gap
            chain = Chain(f"branch {number}", trunk, it.prompt_tokens) if it.shares else None
            made.append(Request(number, now, it.prompt_tokens, it.output_tokens, chain=chain, priority=it.priority))
        return made


class Outcome:
    """What came of it, in values that can be compared."""

    def __init__(self, cluster: SimCluster, iterations: list[Iteration]) -> None:
        self.partial = cluster.partial
        self.now = cluster.now
        self.requests = [
            (
                it.number,
                it.status,
                it.reason,
                it.engine,
                it.arrival,
                it.scheduled,
                it.prefill_end,
                it.first_token,
                it.finish,
                it.cached_tokens,
                it.preemptions,
                it.generated,
            )
            for it in cluster.requests  # in the order in which they came
        ]
        self.iterations = sorted(iterations, key=lambda it: it.engine)  # of each engine in the order of time
        self.engines = [
            (it.iterations, it.preemptions, it.busy_ticks, it.load_tokens, it.pool.free) for it in cluster.engines
        ]
        self.events = sum(it.events for it in cluster.engines)
        self.statuses = {it.status for it in cluster.requests}
        self.placed = {it.number: it.engine for it in cluster.requests}


def assert_equal(scenario: Scenario) -> None:
    compressed, exact = scenario.run(exact=False), scenario.run(exact=True)
    assert compressed.requests == exact.requests
    assert compressed.engines == exact.engines
    assert (compressed.now, compressed.partial) == (exact.now, exact.partial)
    assert compressed.events <= exact.events
    if not exact.partial:  # otherwise the trace has of the last iterations what was decided, not what was done
        assert compressed.iterations == exact.iterations
        assert exact.statuses <= {"finished", "interrupted", "cancelled", "refused"}
        for spec, (*_, load_tokens, free) in zip(scenario.specs, exact.engines, strict=True):
            assert (load_tokens, free) == (0, spec.config.kv_blocks)


def moments(lattice: bool, steps: int) -> st.SearchStrategy[int]:
    """Ticks within so many steps: where many things fall together, or anywhere."""
    together = st.integers(0, steps).map(lambda step: step * STEP)
    return together if lattice else together | st.integers(0, steps * STEP)


def costs(lattice: bool) -> st.SearchStrategy[IterationCost]:
    if lattice:
        return st.just(AffineCost(STEP))
    return (
        st.just(AffineCost(STEP))
        | st.builds(AffineCost, st.integers(1, 999), st.integers(0, 9), st.integers(0, 5), st.integers(0, 20))
        | st.builds(TwoPieces, st.integers(1, 300))
    )


@st.composite
def specs(draw: st.DrawFn, lattice: bool) -> tuple[EngineSpec, ...]:
    """A few engines, all alike or each its own."""
    count = draw(st.integers(1, 4))
    alike = draw(st.booleans())
    made: list[EngineSpec] = []
    for index in range(count):
        if made and alike:
            made.append(EngineSpec(f"engine {index}", made[0].config, made[0].cost, made[0].bucket))
            continue
        bucket = draw(st.integers(0, 1))
        length = draw(st.sampled_from([LIMITS[bucket], LONGEST]))
        block_size = draw(st.sampled_from([1, 4, 16]))
        seats = draw(st.integers(1, 6))
        config = EngineConfig(
            max_model_len=length,
            kv_blocks=draw(st.sampled_from([length, length + 20, 4 * length])) // block_size,
            block_size=block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=draw(st.integers(seats, 128)),
            policy=draw(st.sampled_from(["fcfs", "priority"])),
            enable_prefix_caching=draw(st.booleans()),
        )
        made.append(EngineSpec(f"engine {index}", config, draw(costs(lattice)), bucket))
    return tuple(made)


@st.composite
def trajectory_lists(draw: st.DrawFn) -> tuple[Trajectory, ...]:
    made = []
    for number in range(draw(st.integers(1, 6))):
        turns = [
            Turn(
                draw(st.integers(0, 12)),
                "tool",
                "ok",
                draw(st.integers(0, 8)),
                draw(st.sampled_from([0, 0, 1, 3, 10.5])) * STEP / TICKS,
                draw(st.none() | st.integers(1, 40)) if draw(st.integers(0, 9)) == 0 else None,
            )
            for _ in range(draw(st.integers(0, 4)))
        ]
        prompt = draw(st.integers(0, 2))
        made.append(
            Trajectory(
                f"t{number}",
                f"p{prompt}",
                "task",
                (17, 5, 32)[prompt],
                (*turns, Turn(draw(st.integers(1, 16)), None, None, 0)),
                None,
                0,
                finished=True,
            )
        )
    return tuple(made)


@st.composite
def open_loops(draw: st.DrawFn, lattice: bool) -> tuple[Alone, ...]:
    return tuple(
        Alone(
            draw(st.just(0) | moments(lattice, 12)),
            draw(st.integers(1, 60)),
            draw(st.integers(1, 40)),
            draw(st.integers(0, 2)),
            draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 14)))
    )


def updates(lattice: bool) -> st.SearchStrategy[WeightUpdate]:
    only_first = st.sampled_from([None, frozenset({0})])
    return st.builds(WeightUpdate, moments(lattice, 60), moments(lattice, 8), st.booleans(), only_first)


@st.composite
def scenarios(draw: st.DrawFn, *, closed: bool, lattice: bool) -> Scenario:
    trajectories = draw(trajectory_lists()) if closed else ()
    alone_in_prompt = len({it.prompt_id for it in trajectories}) == len(trajectories)
    return Scenario(
        specs=draw(specs(lattice)),
        policy=draw(st.sampled_from(POLICIES)),
        sticky=draw(st.booleans()),
        trajectories=trajectories,
        concurrency=draw(st.none() | st.integers(1, 4)),
        samples=draw(st.integers(1, 4)) if alone_in_prompt else 1,
        alone=() if closed else draw(open_loops(lattice)),
        cancelled=draw(st.none() | st.tuples(st.integers(1, 3), moments(lattice, 40))),
        updates=tuple(draw(st.lists(updates(lattice), max_size=3))),
        time_limit=draw(st.none() | moments(lattice, 80)),
    )


@settings(max_examples=300, deadline=None)
@given(scenarios(closed=True, lattice=False))
def test_closed_loops(scenario: Scenario) -> None:
    assert_equal(scenario)


@settings(max_examples=300, deadline=None)
@given(scenarios(closed=True, lattice=True))
def test_closed_loops_where_everything_is_a_tie(scenario: Scenario) -> None:
    assert_equal(scenario)


@settings(max_examples=200, deadline=None)
@given(scenarios(closed=False, lattice=False))
def test_open_loops(scenario: Scenario) -> None:
    assert_equal(scenario)


@settings(max_examples=200, deadline=None)
@given(scenarios(closed=False, lattice=True))
def test_open_loops_where_everything_is_a_tie(scenario: Scenario) -> None:
    assert_equal(scenario)


# What the properties above found, each in a case of its own.

ROOMY = EngineConfig(max_model_len=LONGEST, kv_blocks=LONGEST)


def assert_equal_requests(
    engines: int, requests: tuple[tuple[int, int, int, int | None], ...], **changes: Any
) -> Outcome:
    """Requests as (arrival, prompt tokens, output tokens, cancelled at), to the least loaded of equal engines."""
    outcomes = []
    for exact in (False, True):
        made = [
            Request(number, arrival, prompt, output, cancel_at=cancel_at)
            for number, (arrival, prompt, output, cancel_at) in enumerate(requests)
        ]
        iterations: list[Iteration] = []
        cluster = SimCluster(
            [EngineSpec(f"engine {index}", ROOMY, AffineCost(STEP)) for index in range(engines)],
            Requests(lambda made=made: made, {}),  # type: ignore[misc]
            policy_named("least-loaded"),
            exact=exact,
            trace=iterations.append,
            **changes,
        )
        cluster.run()
        outcomes.append(Outcome(cluster, iterations))
    compressed, exact_one = outcomes
    assert compressed.requests == exact_one.requests
    assert (compressed.now, compressed.partial) == (exact_one.now, exact_one.partial)
    return compressed


def test_a_router_sees_at_once_what_is_cancelled_at_the_end_of_an_iteration() -> None:
    """The first engine is in a jump, but between two iterations when 0 is given up: it has no load when 2 arrives."""
    outcome = assert_equal_requests(2, ((0, 10, 20, 5 * STEP), (0, 5, 20, None), (5 * STEP, 5, 1, None)))
    assert outcome.placed == {0: 0, 1: 1, 2: 0}


def test_a_run_ends_with_the_last_thing_that_happens() -> None:
    """Not with the end of a jump that was cut short."""
    outcome = assert_equal_requests(1, ((0, 10, 20, 5 * STEP),))
    assert outcome.now == 5 * STEP


def test_a_time_limit_after_the_end_cuts_nothing_off() -> None:
    outcome = assert_equal_requests(1, ((0, 10, 20, 5 * STEP),), time_limit=10 * STEP)
    assert not outcome.partial and outcome.now == 5 * STEP


def test_a_trajectory_that_is_given_up_says_so() -> None:
    """Though its engine goes on with the iteration that is under way."""
    trajectory = Trajectory("t", "p", "task", 10, (Turn(20, None, None, 0),), None, 0, finished=True)
    replay = Replay([trajectory])
    cluster = SimCluster(
        [EngineSpec("engine", ROOMY, AffineCost(STEP))], Cancelling(replay, every=1, after=5 * STEP + 1)
    )
    cluster.run()
    assert replay.unfinished == {"t": "cancelled"}
