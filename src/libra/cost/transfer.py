"""Seconds to move weights and KV: to engines after a step, between engines, between device and host.

Invariant: a transfer takes at least as long as its slowest link needs for the bytes that must cross it. Sizes are
bytes, rates bytes/s of one direction.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.cost.collectives import Fabric
from libra.cost.device import DeviceProfile

# checkpoint-engine's benchmark (README, vLLM 0.10.2): GLM-4.5-Air (213 GB) 3.47 s and Qwen3-235B-A22B (470 GB) 6.22 s
# on eight H800 are 1.2 s and 93 GB/s; DeepSeek-V3.1 (689 GB) 11.33 s and Kimi-K2 (1.03 TB) 16.04 s on 256 H20 are
# 1.2 s and 68-69 GB/s. Every engine sees all weights and copies its shards of them, whatever its tp.
UPDATE_START = 1.2
UPDATE_RATE = 68e9
HOST_LINK = 25e9  # bytes/s of a device to and from host memory, both ways at a time: PCIe 4 x16 as achieved


@dataclass(frozen=True, slots=True)
class WeightSync:
    """What an update costs: `publish` seconds from the optimiser's end until engines have the weights, of which an
    engine does not generate for `stall`."""

    publish: float
    stall: float


def weight_sync(weight_bytes: float, trainer_nodes: float, engine_nodes: float, fabric: Fabric) -> WeightSync:
    """Send `weight_bytes` from the nodes that train to those that generate, and load them.

    Trainers send their shards without gathering them first; engine nodes pass them on in a pipelined chain (van de
    Geijn 1994), so that each byte enters every engine node once and leaves the trainers once. Engines load while they
    receive; the slower of the two counts. With no other node (`engine_nodes` 0), weights stay inside the node.
    """
    if weight_bytes <= 0 or trainer_nodes <= 0 or engine_nodes < 0:
        raise ValueError(
            f"weight_bytes {weight_bytes}, trainer_nodes {trainer_nodes}, engine_nodes {engine_nodes}: give a positive"
            " size, a positive number of trainers' nodes, and 0 or more of engines'"
        )
    rate = fabric.link if engine_nodes == 0 else fabric.network * min(1.0, trainer_nodes)
    load = UPDATE_START + weight_bytes / UPDATE_RATE
    return WeightSync(publish=max(load, UPDATE_START + weight_bytes / rate), stall=load)


def kv_move_seconds(
    tokens: float, kv_bytes_per_token: float, fabric: Fabric, same_node: bool, devices: int = 1
) -> float:
    """Move the KV of `tokens` tokens from one engine to another, each of `devices` devices that share the bytes.

    `kv_bytes_per_token` is of all layers and heads. Between nodes, each device has its share of the node's network.
    Moving pays where this is less than the seconds to prefill the tokens again.
    """
    rate = fabric.link if same_node else fabric.network / fabric.gpus
    latency = fabric.link_latency if same_node else fabric.network_latency
    return latency + tokens * kv_bytes_per_token / (devices * rate)


def handover_pays(profile: DeviceProfile, tokens: float) -> bool:
    """Whether handing the KV of `tokens` tokens over takes less of the engines' time than prefilling them again.

    Both as measured on the engines of a run. A hand-over also waits for the iteration that its source is in.
    """
    handover = profile.handover
    if handover is None:
        return False
    handed = handover.fixed + tokens * handover.per_token + profile.engine.step
    return handed < tokens * profile.engine.per_prefill_token


def colocated_switch_seconds(leaving: float, arriving: float) -> float:
    """Seconds for devices to change sides, from generation to training or back.

    `leaving` bytes per device go to host memory (of an engine nothing: its weights are there, its KV is dropped; of a
    trainer, weights and optimiser state as stored), then `arriving` bytes come from it. What leaves makes the room for
    what arrives, so the two do not overlap.
    """
    if leaving < 0 or arriving < 0:
        raise ValueError(f"leaving is {leaving}, arriving {arriving}; sizes are 0 or more")
    return UPDATE_START + (leaving + arriving) / HOST_LINK
