"""Links that transfers share, against the same rule in fractions."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from libra.sim.clock import TICKS
from libra.sim.link import Link, Network, link

RATE = TICKS / 128  # bytes/s: a byte in 128 ticks


def ends(transfers: list[tuple[int, int, int, int]]) -> dict[int, int]:
    """(tick, source, target, bytes) of each; the tick at which each ends."""
    network = Network()
    out: dict[int, Link] = {}
    into: dict[int, Link] = {}
    coming = sorted(enumerate(transfers), key=lambda it: (it[1][0], it[0]))
    ended: dict[int, int] = {}
    while coming or len(network):
        ticks = [tick for tick in (network.next_end(), coming[0][1][0] if coming else None) if tick is not None]
        now = min(ticks)
        for key in network.ended(now):
            assert isinstance(key, int)
            ended[key] = now
        while coming and coming[0][1][0] == now:
            number, (_, source, target, size) = coming.pop(0)
            links = out.setdefault(source, link(RATE)), into.setdefault(target, link(RATE))
            network.begin(number, *links, size, now)
    assert sum(it.moved for it in out.values()) == sum(it.moved for it in into.values()) == sum(t[3] for t in transfers)
    return ended


def fluid(transfers: list[tuple[int, int, int, int]]) -> dict[int, Fraction]:
    left: dict[int, Fraction] = {}
    ended: dict[int, Fraction] = {}
    now = Fraction(0)
    coming = sorted(enumerate(transfers), key=lambda it: (it[1][0], it[0]))
    while coming or left:
        rates = {}
        for key in left:
            _, source, target, _ = transfers[key]
            crowd = max(
                sum(transfers[other][1] == source for other in left),
                sum(transfers[other][2] == target for other in left),
            )
            rates[key] = Fraction(1, 128 * crowd)
        until = [now + left[key] / rates[key] for key in left] + [Fraction(it[1][0]) for it in coming[:1]]
        following = min(until)
        for key in list(left):
            left[key] -= rates[key] * (following - now)
            if left[key] <= 0:
                ended[key] = following
                del left[key]
        now = following
        while coming and coming[0][1][0] <= now:
            number, (_, _, _, size) = coming.pop(0)
            left[number] = Fraction(size)
    return ended


def test_two_transfers_out_of_one_engine_take_half_each() -> None:
    assert ends([(0, 0, 0, 10), (0, 0, 1, 10)]) == {0: 2560, 1: 2560}
    assert ends([(0, 0, 0, 10), (640, 0, 1, 10)]) == {0: 1920, 1: 2560}  # alone, together, alone
    assert ends([(0, 0, 0, 10), (0, 1, 1, 10)]) == {0: 1280, 1: 1280}  # nothing in common


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, 2), st.integers(0, 2), st.integers(1, 60)),
        min_size=1,
        max_size=12,
    )
)
def test_shares_are_those_of_a_fluid(transfers: list[tuple[int, int, int, int]]) -> None:
    found, wanted = ends(transfers), fluid(transfers)
    assert found.keys() == wanted.keys()
    for key, tick in found.items():
        assert abs(tick - wanted[key]) <= 2 + len(transfers)  # whole ticks, at every change of a share


def test_a_transfer_that_is_dropped_leaves_its_share() -> None:
    network, one, other = Network(), link(RATE), link(RATE)
    network.begin("a", one, other, 10, 0)
    network.begin("b", one, other, 10, 0)
    network.drop("a", 1280)
    assert "a" not in network
    assert network.next_end() == 1920
    assert network.ended(1920) == ["b"]
    assert (one.moved, other.moved) == (10, 10)
