"""Engines that come and go while a cluster works, requests that wait for them, and actions at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from elastic import Places, following
from hypothesis import given, settings
from hypothesis import strategies as st

from libra.route.baselines import LeastLoaded
from libra.route.policy import Fleet, Placement
from libra.route.policy import TurnRequest as Asked
from libra.sim.cluster import SimCluster
from libra.sim.deployment import WeightUpdate
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.workload.caller import Caller
from libra.sim.workload.replay import Replay
from libra.sim.workload.requests import Requests
from libra.trajectory import Trajectory, Turn

CONFIG = EngineConfig(max_model_len=64, kv_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
TEN = AffineCost(10)  # ticks for any iteration
SLOPED = AffineCost(10, per_sequence=1, per_context_token=1, per_new_token=2)


def spec_of(name: str, *, longest: int = 64, bucket: int = 0, cost: AffineCost = TEN) -> EngineSpec:
    return EngineSpec(name, replace(CONFIG, max_model_len=longest), cost, bucket)


def open_loop(*requests: Request) -> Requests:
    return Requests(lambda: sorted(requests, key=lambda it: (it.arrival, it.number)), {})


def cluster_of(names: str, *requests: Request, **others: Any) -> SimCluster:
    return SimCluster([spec_of(name) for name in names], open_loop(*requests), LeastLoaded(), **others)


def test_engines_of_unequal_pace_are_told_apart() -> None:
    twice = AffineCost(20, per_sequence=2, per_context_token=2, per_new_token=4)
    specs = [spec_of("a", cost=SLOPED), spec_of("b", cost=twice), spec_of("c", cost=replace(SLOPED))]
    cluster = SimCluster(specs, open_loop(), LeastLoaded())
    assert [it.pace_class for it in cluster.placer.fleet.instances] == [0, 1, 0]


# Actions


def test_an_action_comes_after_what_ends_and_before_what_arrives() -> None:
    ending, arriving = Request(0, 0, 8, 5), Request(1, 50, 8, 5)
    cluster = cluster_of("a", ending, arriving)
    seen: list[tuple[int, str, str | None]] = []

    def look(now: int) -> None:
        seen.append((now, ending.status, None if arriving.engine is None else arriving.status))

    cluster.at(50, look)
    cluster.at(49, look)
    cluster.at(50, lambda now: cluster.at(now, look))  # more at the same instant
    cluster.at(51, look)
    cluster.run()
    assert seen == [(49, "running", None), (50, "finished", None), (50, "finished", None), (51, "finished", "running")]


def test_what_is_over_cannot_be_done() -> None:
    cluster = cluster_of("a", Request(0, 0, 8, 5))
    cluster.at(30, lambda _: cluster.at(29, print))
    with pytest.raises(ValueError, match="tick 29 is in the past; give 30, the present"):
        cluster.run()


def test_actions_go_on_without_any_request() -> None:
    cluster = cluster_of("a")
    extra = Request(7, 500, 8, 2)
    cluster.at(300, lambda _: cluster.submit(extra))
    cluster.at(900, lambda _: None)
    cluster.run()
    assert (extra.status, extra.finish, cluster.now) == ("finished", 520, 900)
    assert cluster.requests == [extra]


def test_an_update_comes_at_once() -> None:
    request = Request(0, 0, 8, 9)
    cluster = cluster_of("a", request)
    cluster.at(35, lambda now: cluster.update(WeightUpdate(now, 100)))
    cluster.run()
    assert request.finish == 90 + 100


def test_generated_is_what_there_is_by_now() -> None:
    request = Request(0, 0, 8, 9)
    cluster = cluster_of("a", request)
    found: list[int] = []
    for tick in (0, 1, 10, 45, 50, 89, 90, 91):
        cluster.at(tick, lambda _: found.append(cluster.generated(request)))
    cluster.run()
    assert found == [0, 0, 1, 4, 5, 8, 9, 9]


# Engines


@pytest.mark.parametrize("exact", [False, True])
def test_what_a_closed_engine_had_goes_on_elsewhere(exact: bool) -> None:
    """Both run on `a`, as `b` is not there yet. Iterations end at multiples of 10 ticks."""
    requests = [Request(0, 0, 8, 9), Request(1, 0, 8, 5)]
    cluster = cluster_of("a", *requests, exact=exact, patient=True)
    cluster.at(33, lambda _: cluster.close("a"))
    cluster.at(200, lambda _: cluster.add(spec_of("b")))
    cluster.run()
    assert [(it.status, it.generated, it.finish) for it in requests] == [("interrupted", 4, 40)] * 2
    rest = cluster.requests[2:]
    assert [(it.prompt_tokens, it.output_tokens, it.engine, it.scheduled, it.finish) for it in rest] == [
        (12, 5, 1, 200, 250),
        (12, 1, 1, 200, 210),
    ]
    assert [engine.closed for engine in cluster.engines] == [True, False]
    assert [instance.id for instance in cluster.placer.fleet.instances] == ["b"]


def test_names_are_of_one_engine_at_a_time() -> None:
    cluster = cluster_of("ab", Request(0, 0, 8, 9), Request(1, 0, 8, 9), Request(2, 100, 8, 2), Request(3, 100, 8, 2))
    with pytest.raises(ValueError, match="engine b exists already: close it first"):
        cluster.add(spec_of("b"))
    cluster.at(20, lambda _: cluster.close("b"))
    cluster.at(50, lambda _: cluster.add(spec_of("b")))
    cluster.run()
    assert [spec.name for spec in cluster.specs] == ["a", "b", "b"]
    assert [it.engine for it in cluster.requests if it.arrival == 100] == [0, 2]


def test_requests_wait_for_an_engine_that_holds_them() -> None:
    """And are in the list of requests once, though they arrive several times."""
    small, large = Request(0, 0, 8, 3), Request(1, 0, 40, 3)
    cluster = SimCluster([spec_of("a", longest=16)], open_loop(small, large), LeastLoaded(), patient=True)
    cluster.at(50, lambda _: cluster.add(spec_of("b", longest=32)))
    cluster.at(70, lambda _: cluster.add(spec_of("c")))
    cluster.run()
    assert (small.engine, small.finish) == (0, 30)
    assert (large.engine, large.arrival, large.finish) == (2, 70, 100)
    assert cluster.requests == [small, large]
    assert cluster.placer.placements == 2


def test_the_impatient_are_refused_and_the_patient_wait_for_ever() -> None:
    reason = "no engine holds its 40 tokens and a turn of 1 more"
    cluster = SimCluster([spec_of("a", longest=16)], open_loop(Request(3, 5, 40, 3)), LeastLoaded())
    cluster.run()
    assert [(it.status, it.reason, it.finish) for it in cluster.requests] == [("refused", reason, 5)]
    cluster = SimCluster([spec_of("a", longest=16)], open_loop(Request(3, 5, 40, 3)), LeastLoaded(), patient=True)
    with pytest.raises(RuntimeError, match=f"1 requests wait forever for an engine, first request 3: {reason}"):
        cluster.run()


@pytest.mark.parametrize("keep", [False, True])
def test_with_a_time_limit_who_waits_is_unfinished(keep: bool) -> None:
    waiting, late = Request(0, 0, 40, 3), Request(1, 900, 8, 3)
    cluster = SimCluster(
        [spec_of("a", longest=16)], open_loop(waiting, late), LeastLoaded(), patient=True, keep=keep, time_limit=100
    )
    cluster.run()
    assert cluster.partial and cluster.now == 100
    assert cluster.requests == [waiting, late] * keep
    if keep:
        assert [it.status for it in cluster.requests] == ["unfinished"] * 2


class Ends(Requests):
    """An open loop that remembers who it was told had ended, and when."""

    def __init__(self, *requests: Request) -> None:
        super().__init__(lambda: requests, {})
        self.told: list[tuple[int, int]] = []

    def finished(self, request: Request, now: int) -> None:
        self.told.append((request.number, now))


def test_who_waits_for_an_engine_may_be_given_up() -> None:
    """At once, though an engine that would do comes later; also what was on one that closed."""
    never, before = Request(0, 0, 40, 3, cancel_at=20), Request(1, 0, 8, 9, cancel_at=60)
    workload = Ends(never, before)
    cluster = SimCluster([spec_of("a", longest=32)], workload, LeastLoaded(), patient=True)
    cluster.at(35, lambda _: cluster.close("a"))
    cluster.at(100, lambda _: cluster.add(spec_of("b")))
    cluster.run()
    *_, rest = cluster.requests
    assert workload.told == [(0, 20), (rest.number, 60)]
    assert [(it.status, it.finish) for it in (never, before, rest)] == [
        ("cancelled", 20),
        ("interrupted", 40),
        ("cancelled", 60),
    ]
    assert cluster.engines[1].iterations == 0


class Looking(LeastLoaded):
    """Least loaded, and a record of the fleets that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.saw: list[tuple[tuple[int, ...], dict[str, int]]] = []

    def place(self, request: Asked, fleet: Fleet) -> Placement | None:
        self.saw.append((fleet.limits, {it.id: it.bucket for it in fleet.instances}))
        return super().place(request, fleet)


def test_a_policy_sees_the_buckets_of_the_moment() -> None:
    policy = Looking()
    cluster = SimCluster(
        [spec_of("a"), spec_of("b", bucket=1)],
        open_loop(*(Request(number, 100 * number, 8, 2) for number in range(4))),
        policy,
        limits=(16, 64),
    )
    cluster.at(50, lambda _: cluster.reallocate((8, 32, 64), {"a": 2, "b": 0}))
    cluster.at(150, lambda _: cluster.add(spec_of("c", bucket=1)))
    cluster.at(250, lambda _: cluster.close("a"))
    cluster.run()
    assert policy.saw == [
        ((16, 64), {"a": 0, "b": 1}),
        ((8, 32, 64), {"a": 2, "b": 0}),
        ((8, 32, 64), {"a": 2, "b": 0, "c": 1}),
        ((8, 32, 64), {"b": 0, "c": 1}),
    ]


def test_a_policy_is_told_of_a_return_once_and_of_engines_that_go() -> None:
    """No engine can take the second turn when the tool returns: the policy is asked again, as for a first turn."""
    trajectory = Trajectory(
        "0", "p", "t", 8, (Turn(3, "search", "ok", 2, 20 / 1e12), Turn(6, None, None, 0)), None, 0, True
    )
    policy = Places({"0": ["a", "b", "c"]})
    cluster = SimCluster([spec_of("a")], Replay([trajectory]), policy, patient=True)
    cluster.at(70, lambda _: cluster.add(spec_of("b")))
    cluster.at(85, lambda _: cluster.add(spec_of("c")))
    cluster.at(95, lambda _: cluster.close("b"))
    cluster.run()
    assert policy.told == [
        ("place", "0"),
        ("tool", "0"),
        ("place", "0"),
        ("gone", "b"),
        ("place", "0"),
        ("finished", "0"),
    ]
    assert [it.generated for it in cluster.requests] == [3, 3, 3]
    assert cluster.now == 130


# Everything at once


@dataclass(frozen=True)
class Change:
    """At a tick: close the engine of a name if there is one, or else start it."""

    at: int
    name: str


def trajectories(seed: int, count: int) -> list[Trajectory]:
    random = Random(seed)
    made = []
    for number in range(count):
        turns = []
        for _ in range(random.randint(0, 3)):
            status = random.choice(["ok", "error"])
            seconds = random.random() / 1e9
            turns.append(Turn(random.randint(1, 8), "search", status, random.randint(0, 3), seconds))
        turns.append(Turn(random.randint(1, 8), None, None, 0))
        made.append(Trajectory(str(number), f"p{number % 3}", "t", 8, tuple(turns), None, 0, True))
    return made


changes = st.builds(Change, st.integers(0, 2500), st.sampled_from("abc"))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(1, 8),
    st.lists(changes, max_size=8),
    st.sampled_from([TEN, SLOPED]),
    st.booleans(),
)
def test_nothing_is_lost_and_jumping_changes_nothing(
    seed: int, count: int, changes: list[Change], cost: AffineCost, refresh: bool
) -> None:
    work = trajectories(seed, count)

    def serve(exact: bool) -> tuple[object, ...]:
        policy = following(seed, "abc")
        cluster = SimCluster(
            [spec_of(name, cost=cost) for name in "abc"],
            Replay(work),
            policy,
            patient=True,
            exact=exact,
            updates=[WeightUpdate(700, 50, refresh)],
        )

        def turn(name: str) -> Callable[[int], None]:
            def act(_: int) -> None:
                here = name in {it.id for it in cluster.placer.fleet.instances}
                cluster.close(name) if here else cluster.add(spec_of(name, cost=cost))

            return act

        for change in changes:
            cluster.at(change.at, turn(change.name))
        for name in "abc":  # in the end all are there
            cluster.at(
                5000,
                lambda _, name=name: (
                    None
                    if name in {it.id for it in cluster.placer.fleet.instances}
                    else cluster.add(spec_of(name, cost=cost))
                ),
            )
        cluster.run()
        tokens: Counter[str] = Counter()
        for request in cluster.requests:
            assert request.status in ("finished", "interrupted")
            assert (request.generated == request.output_tokens) == (request.status == "finished")
            assert isinstance(request.owner, Caller)
            tokens[request.owner.trajectory.id] += request.generated
        assert tokens == {it.id: it.generated_tokens for it in work}
        told = Counter(policy.told)
        for it in work:
            assert told["tool", it.id] == len(it.turns) - 1 and told["finished", it.id] == 1
            assert told["forget", it.id] == 0
        for engine in cluster.engines:
            assert (engine.pool.held, engine.load_tokens, engine.unfinished) == (0, 0, [])
        assert len(set(cluster.requests)) == len(cluster.requests)
        return (
            [(it.number, it.engine, it.arrival, it.scheduled, it.finish, it.generated) for it in cluster.requests],
            policy.told,
            cluster.now,
            [(engine.busy_ticks, engine.iterations, engine.closed) for engine in cluster.engines],
        )

    assert serve(exact=False) == serve(exact=True)
