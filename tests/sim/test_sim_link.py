"""A link against fair sharing, against itself alone, and in a table worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.route.baselines import RoundRobin
from libra.sim.clock import TICKS, ticks
from libra.sim.cluster import SimCluster
from libra.sim.engine.config import EngineConfig, EngineSpec
from libra.sim.engine.iteration_cost import AffineCost
from libra.sim.engine.request import Request
from libra.sim.link import Link
from libra.sim.weight_update import WeightUpdate
from libra.sim.workload.requests import Requests


def test_transfers_by_hand() -> None:
    link = Link(bandwidth=1e9, latency=2e-6)  # a byte takes 1,000 ticks
    assert link.send(0, 1_000) == 1_000_000 + 2_000_000
    assert link.send(400_000, 500) == 1_500_000 + 2_000_000  # behind the first, whose latency it does not wait for
    assert link.send(1_500_000, 0) == 1_500_000 + 2_000_000  # nothing to send, but it arrives no earlier
    assert link.send(9_000_000, 1) == 9_001_000 + 2_000_000  # the link was idle
    assert (link.busy_until, link.busy_ticks, link.bytes_moved) == (9_001_000, 1_501_000, 1_501)


@pytest.mark.parametrize(
    ("bandwidth", "size", "wanted"),
    [
        (TICKS, 7, 7),
        (3 * TICKS, 1, 1),  # a third of a tick: rounded up
        (3 * TICKS, 3, 1),
        (3 * TICKS, 4, 2),
        (0.5, 1, 2 * TICKS),
        (25e9, 10**18, 10**18 * 40),  # exact far beyond what a float tells apart
        (25e9, 10**18 + 1, (10**18 + 1) * 40),
    ],
)
def test_sending_is_exact_and_rounded_up(bandwidth: float, size: int, wanted: int) -> None:
    assert Link(bandwidth).sending_ticks(size) == wanted


@pytest.mark.parametrize(
    ("bandwidth", "latency", "message"),
    [
        (0.0, 0.0, "bandwidth is 0.0 bytes/s; give a finite number above 0"),
        (-1.0, 0.0, "bandwidth is -1.0"),
        (float("inf"), 0.0, "bandwidth is inf"),
        (float("nan"), 0.0, "bandwidth is nan"),
        (1.0, -1.0, "-1.0 seconds is no duration"),
    ],
)
def test_what_is_no_link_is_refused(bandwidth: float, latency: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(bandwidth, latency)


def test_a_request_that_is_refused_changes_nothing() -> None:
    link = Link(1e9)
    link.send(5_000, 1)
    for now, size, message in [(6_000, -1, "a transfer of -1 bytes"), (4_999, 1, "ask in order of time")]:
        with pytest.raises(ValueError, match=message):
            link.send(now, size)
    assert (link.busy_until, link.busy_ticks, link.bytes_moved) == (6_000, 1_000, 1)
    assert link.send(5_000, 1) == 7_000


requests = st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 2_000)), min_size=1, max_size=30).map(sorted)
bandwidths = st.floats(0.05 * TICKS, 20 * TICKS)
latencies = st.floats(0, 1e-9)


@given(requests, bandwidths, latencies)
def test_never_faster_than_alone_never_idle_and_in_order(
    asked: list[tuple[int, int]], bandwidth: float, latency: float
) -> None:
    link = Link(bandwidth, latency)
    arrived = [link.send(now, size) for now, size in asked]
    assert arrived == sorted(arrived)
    for (now, size), end in zip(asked, arrived, strict=True):
        assert end >= now + Link(bandwidth, latency).send(0, size)
        assert end - now >= size * TICKS / Fraction(bandwidth) + ticks(latency)
    # Idle only when nothing waits: from any request on, time either sends bytes or has none to send.
    sent = 0
    for (now, size), end in zip(asked, arrived, strict=True):
        duration = link.sending_ticks(size)
        assert end - ticks(latency) == max(now, sent) + duration
        sent = end - ticks(latency)
    total = sum(size for _, size in asked)
    assert link.bytes_moved == total
    assert link.busy_until - asked[0][0] >= link.busy_ticks >= total * TICKS / Fraction(bandwidth)
    assert link.busy_ticks < total * TICKS / Fraction(bandwidth) + len(asked)  # rounding: less than a tick each


def fair_sharing(asked: list[tuple[int, int]]) -> list[Fraction]:
    """When each transfer is sent if all under way share one byte a tick equally; advanced from event to event."""
    left: dict[int, Fraction] = {}
    done = [Fraction(0)] * len(asked)
    clock, coming = Fraction(0), list(enumerate(asked))
    while coming or left:
        arrival = Fraction(coming[0][1][0]) if coming else None
        departure = clock + min(left.values()) * len(left) if left else None
        upcoming = min(instant for instant in (arrival, departure) if instant is not None)
        for number in left:
            left[number] -= (upcoming - clock) / len(left)
        clock = upcoming
        for number in [number for number, size in left.items() if size == 0]:
            done[number] = clock
            del left[number]
        while coming and coming[0][1][0] == clock:
            number, (_, size) = coming.pop(0)
            left[number] = Fraction(size)
    return done


@given(requests)
def test_every_busy_period_ends_as_with_fair_sharing(asked: list[tuple[int, int]]) -> None:
    link = Link(TICKS)  # a byte a tick: no rounding
    first_come = [link.send(now, size) for now, size in asked]
    shared = fair_sharing(asked)
    following = [now for now, _ in asked[1:]] + [first_come[-1] + 1]
    ends = [number for number, now in enumerate(following) if now > first_come[number]]  # the link is idle after it
    for number in ends:
        assert first_come[number] == max(shared[: number + 1])
    assert link.busy_until == max(shared)


def test_a_small_transfer_waits_for_a_large_one() -> None:
    link = Link(TICKS)
    asked = [(0, 1_000), (0, 10)]
    assert [link.send(*each) for each in asked] == [1_000, 1_010]
    assert fair_sharing(asked) == [1_010, 20]


def test_the_same_updates_over_a_link_can_be_simulated_again() -> None:
    updates = (WeightUpdate(5, 0, link=Link(1e12), weight_bytes=40),)
    config = EngineConfig(max_model_len=64, kv_blocks=64)
    ends = []
    for _ in range(2):
        workload = Requests(lambda: [Request(0, 0, 4, 3), Request(1, 0, 4, 3)], {})
        specs = [EngineSpec(name, config, AffineCost(10)) for name in "ab"]
        cluster = SimCluster(specs, workload, RoundRobin(), updates=updates)
        cluster.run()
        ends.append([request.finish for request in cluster.requests])
    assert ends == [[70, 110]] * 2  # the second engine's weights come after the first's
