"""Moving weights and KV against measured updates and numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.cost.transfer import (
    UPDATE_START,
    Fabric,
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    colocated_switch_seconds,
    dispatch_seconds,
    fabric,
    kv_move_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
    weight_sync,
)
from libra.hardware.cluster import GPUS, NodeClass

NODE = Fabric(gpus=8, link=150e9, network=22.5e9, link_latency=2e-6, network_latency=5e-6)
H20 = Fabric(gpus=8, link=300e9, network=360e9)  # eight 400 Gb/s ports at 90 %


@pytest.mark.parametrize(
    ("size", "measured"),
    [(1.03e12, 16.04), (689e9, 11.33)],  # checkpoint-engine's README: Kimi-K2 and DeepSeek-V3.1 on 256 H20, fp8
)
def test_measured_updates(size: float, measured: float) -> None:
    assert weight_sync(size, 32, 32, H20).publish == pytest.approx(measured, rel=0.05)


def test_a_trillion_parameters_take_about_twenty_seconds() -> None:
    assert 10 < weight_sync(1e12, 16, 100, H20).publish < 20


def test_a_slow_network_bounds_the_update() -> None:
    sync = weight_sync(225e9, 2, 4, NODE)
    assert sync.publish == pytest.approx(UPDATE_START + 10)
    assert sync.stall == pytest.approx(UPDATE_START + 225e9 / 68e9)
    half_a_node = weight_sync(225e9, 0.5, 4, NODE)  # with half of the network's ports
    assert half_a_node.publish == pytest.approx(UPDATE_START + 20)


def test_inside_a_node_weights_take_its_links() -> None:
    sync = weight_sync(30e9, 0.5, 0, NODE)
    assert sync.publish == sync.stall  # the links are faster than engines load


@pytest.mark.parametrize(("size", "trainers", "engines"), [(0, 1, 1), (1e9, 0, 1), (1e9, 1, -1)])
def test_an_impossible_update_is_refused(size: float, trainers: float, engines: float) -> None:
    with pytest.raises(ValueError, match="give a positive size"):
        weight_sync(size, trainers, engines, NODE)


def test_moving_kv_between_nodes_beats_prefill() -> None:
    """Qwen3-14B holds 160 KiB a token; to prefill 8K tokens takes 0.93 s on an A100."""
    per_token = 40 * 2 * 8 * 128 * 2
    assert kv_move_seconds(8192, per_token, NODE, same_node=False) == pytest.approx(8192 * per_token / 2.8125e9 + 5e-6)
    assert kv_move_seconds(8192, per_token, NODE, same_node=False) < 0.93
    assert kv_move_seconds(8192, per_token, NODE, same_node=True) == pytest.approx(8192 * per_token / 150e9 + 2e-6)
    assert kv_move_seconds(8192, per_token, NODE, same_node=True, devices=4) < 0.01


def test_a_switch_makes_room_before_it_loads() -> None:
    assert colocated_switch_seconds(50e9, 25e9) == pytest.approx(UPDATE_START + 3)
    with pytest.raises(ValueError, match="leaving is -1"):
        colocated_switch_seconds(-1, 0)


HGX = Fabric(gpus=8, link=100e9, network=20e9, link_latency=2e-6, network_latency=5e-6)


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
    assert float(group.bandwidth(HGX)) == pytest.approx(bandwidth)
    assert float(group.latency(HGX)) == pytest.approx(latency)


def test_all_gather_moves_all_but_the_own_share() -> None:
    wanted = 3 / 4 * 1e9 / 100e9 + 3 * 2e-6
    assert float(all_gather_seconds(1e9, Group(4), HGX)) == pytest.approx(wanted)
    assert float(reduce_scatter_seconds(1e9, Group(4), HGX)) == pytest.approx(wanted)
    assert float(all_reduce_seconds(1e9, Group(4), HGX)) == pytest.approx(2 * wanted)


def reached(parts: np.ndarray) -> np.ndarray:
    """A token has two experts at most."""
    return np.minimum(parts, 2.0)


@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        (Group(8), 2 * 7 / 8 * 1e9 / 100e9 + 14e-6),  # two of the eight devices, one in eight times its own
        (Group(16), 2 * 1 / 2 * 1e9 / (20e9 / 8) + 14e-6 + 5e-6),  # both nodes, of which one is its own
        (Group(32), 2 * 3 / 4 * 1e9 / (20e9 / 8) + 14e-6 + 10e-6),  # two of four nodes
        (Group(1), 0.0),
    ],
)
def test_a_token_crosses_once_to_each_node_and_device_that_it_reaches(group: Group, wanted: float) -> None:
    assert float(dispatch_seconds(1e9, reached, group, HGX)) == pytest.approx(wanted)


def dispatched(size: float, group: Group, fabric: Fabric) -> np.ndarray:
    return dispatch_seconds(size, reached, group, fabric)


@pytest.mark.parametrize(("stride", "wanted"), [(1, 1e9 / 100e9 + 2e-6), (8, 1e9 / (20e9 / 8) + 5e-6)])
def test_point_to_point(stride: int, wanted: float) -> None:
    assert float(point_to_point_seconds(1e9, stride, HGX)) == pytest.approx(wanted)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16, 64]), st.sampled_from([1, 2, 4, 8, 32])), min_size=1))
def test_columns_are_the_same_as_one_by_one(rows: list[tuple[int, int]]) -> None:
    sizes, strides = np.array(rows, dtype=float).T
    for seconds in (all_gather_seconds, dispatched):
        one_by_one = [float(seconds(3e8, Group(size, stride), HGX)) for size, stride in rows]
        assert seconds(3e8, Group(sizes, strides), HGX) == pytest.approx(one_by_one)
