"""Collectives against numbers worked out by hand and measured ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost.collectives import (
    Fabric,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    fabric,
    point_to_point_seconds,
    reduce_scatter_seconds,
)
from libra.hardware.cluster import GPUS, NodeClass

NODE = Fabric(gpus=8, link=100e9, network=20e9, link_latency=2e-6, network_latency=5e-6)


def nodes(gpu: str) -> NodeClass:
    return NodeClass("n", 4, 8, GPUS[gpu], GPUS[gpu].link, 25e9)


@pytest.mark.parametrize(
    ("gpu", "low", "high"), [("A100", 180e9, 192e9), ("H100", 360e9, 380e9), ("A800", 142e9, 155e9)]
)
def test_bus_bandwidth_is_the_measured_one(gpu: str, low: float, high: float) -> None:
    size = 8e9
    seconds = float(all_reduce_seconds(size, Group(8), fabric(nodes(gpu))))
    assert low < 2 * 7 / 8 * size / seconds < high


def test_a_small_all_reduce_takes_its_latency() -> None:
    assert float(all_reduce_seconds(8192, Group(8), fabric(nodes("A100")))) == pytest.approx(25e-6, rel=0.1)


@pytest.mark.parametrize(
    ("group", "bandwidth", "latency"),
    [
        (Group(8), 100e9, 7 * 2e-6),  # one node
        (Group(16), 20e9, 7 * 2e-6 + 5e-6),  # two whole nodes: one ring has both networks
        (Group(4, 8), 20e9 / 8, 2 * 5e-6),  # one device of each of four nodes: eight groups share a network
        (Group(8, 2), 20e9 / 2, 3 * 2e-6 + 5e-6),  # every other device of two nodes
        (Group(1), 100e9, 0.0),
    ],
)
def test_a_group_gets_its_share_of_the_slowest_link(group: Group, bandwidth: float, latency: float) -> None:
    assert float(group.bandwidth(NODE)) == pytest.approx(bandwidth)
    assert float(group.latency(NODE)) == pytest.approx(latency)


def test_all_gather_moves_all_but_the_own_share() -> None:
    wanted = 3 / 4 * 1e9 / 100e9 + 3 * 2e-6
    assert float(all_gather_seconds(1e9, Group(4), NODE)) == pytest.approx(wanted)
    assert float(reduce_scatter_seconds(1e9, Group(4), NODE)) == pytest.approx(wanted)
    assert float(all_reduce_seconds(1e9, Group(4), NODE)) == pytest.approx(2 * wanted)


def test_all_to_all_between_nodes_is_bound_by_the_device_share_of_the_network() -> None:
    inside = float(all_to_all_seconds(1e9, Group(8), NODE))
    outside = float(all_to_all_seconds(1e9, Group(16), NODE))
    assert inside == pytest.approx(7 / 8 * 1e9 / 100e9 + 14e-6)
    assert outside == pytest.approx(8 / 16 * 1e9 / (20e9 / 8) + 14e-6 + 5e-6)


@pytest.mark.parametrize(("stride", "wanted"), [(1, 1e9 / 100e9 + 2e-6), (8, 1e9 / (20e9 / 8) + 5e-6)])
def test_point_to_point(stride: int, wanted: float) -> None:
    assert float(point_to_point_seconds(1e9, stride, NODE)) == pytest.approx(wanted)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16, 64]), st.sampled_from([1, 2, 4, 8, 32])), min_size=1))
def test_columns_are_the_same_as_one_by_one(rows: list[tuple[int, int]]) -> None:
    sizes, strides = np.array(rows, dtype=float).T
    for seconds in (all_gather_seconds, all_to_all_seconds):
        one_by_one = [float(seconds(3e8, Group(size, stride), NODE)) for size, stride in rows]
        assert seconds(3e8, Group(sizes, strides), NODE) == pytest.approx(one_by_one)
