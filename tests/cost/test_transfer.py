"""Moving weights and KV against measured updates and numbers worked out by hand."""

from __future__ import annotations

import pytest

from libra.cost.collectives import Fabric
from libra.cost.transfer import UPDATE_START, colocated_switch_seconds, kv_move_seconds, weight_sync

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
