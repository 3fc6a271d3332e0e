"""Seconds to move bytes: collective operations; weights and KV between engines, trainers and the host.

Invariant: a transfer takes at least the time that its slowest link needs for its bytes. Groups that use a node's
network at the same time share it. Sizes are bytes, rates bytes/s of one direction. Arguments of collectives may be
numpy columns.

Collectives take alpha + beta * n, with the steps of Thakur, Rabenseifner and Gropp 2005 (Optimization of collective
communication operations in MPICH, IJHPCA 19:1): a ring inside the node, recursive doubling between nodes. Bandwidth
terms are those of a ring, (p - 1) / p of the bytes through every link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from libra.cost.device import DeviceProfile
from libra.hardware.cluster import NodeClass
from libra.hardware.gpus import record_of
from libra.hardware.parallel import Array

Column = Array | float

# Assumed share of the stated speed of RoCE or InfiniBand that NCCL reaches.
NETWORK_SHARE = 0.9
# An all-reduce of 8 KiB among eight A100 takes about 25 us: 14 steps of a ring.
LINK_LATENCY = 1.8e-6
NETWORK_LATENCY = 5e-6  # assumed, per hop between nodes, host-side proxy included


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links between devices, at achieved speeds: `link` between the devices of a node, `network` from one node to the
    others.
    """

    gpus: int  # per node
    link: float  # bytes/s per device, one direction
    network: float  # bytes/s per node, one direction; shared by its devices
    link_latency: float = LINK_LATENCY
    network_latency: float = NETWORK_LATENCY


def fabric(nodes: NodeClass) -> Fabric:
    """The fabric of a class of nodes, at the cited shares of its nominal bandwidths."""
    return Fabric(nodes.gpus, nodes.intra_bandwidth * record_of(nodes.gpu).bus, nodes.inter_bandwidth * NETWORK_SHARE)


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that communicate: `size` devices, `stride` apart in the order in which nodes are filled."""

    size: Column
    stride: Column = 1.0

    def members(self, fabric: Fabric) -> Array:
        """Number of a node's devices that are in one group."""
        per_node: Array = np.maximum(1.0, fabric.gpus // np.asarray(self.stride, dtype=float))
        return np.minimum(self.size, per_node)

    def bandwidth(self, fabric: Fabric) -> Array:
        """Bytes/s of a ring over the group. Groups that interleave in a node divide its network."""
        members = self.members(fabric)
        shared = np.minimum(fabric.link, fabric.network * members / fabric.gpus)
        return np.where(self.size > members, shared, fabric.link)

    def latency(self, fabric: Fabric) -> Array:
        members = self.members(fabric)
        nodes = np.ceil(self.size / members)
        seconds: Array = (members - 1) * fabric.link_latency + np.ceil(np.log2(nodes)) * fabric.network_latency
        return seconds


def all_gather_seconds(size: Column, group: Group, fabric: Fabric) -> Array:
    """Seconds of an all-gather: every device starts with its share and ends with all `size` bytes."""
    return (group.size - 1) / group.size * size / group.bandwidth(fabric) + group.latency(fabric)


def reduce_scatter_seconds(size: Column, group: Group, fabric: Fabric) -> Array:
    """Seconds of a reduce-scatter: every device starts with `size` bytes and ends with its share of the sum."""
    return all_gather_seconds(size, group, fabric)


def all_reduce_seconds(size: Column, group: Group, fabric: Fabric) -> Array:
    """Seconds of an all-reduce (reduce-scatter, then all-gather): every device starts with `size` bytes and ends with
    the sum.
    """
    return 2 * all_gather_seconds(size, group, fabric)


def dispatch_seconds(size: Column, reached: Callable[[Array], Array], group: Group, fabric: Fabric) -> Array:
    """Seconds in which every device sends its tokens, `size` bytes in total, to the devices with their experts.

    A token goes once to each node that has one of its experts, and inside the node once to each such device, as in
    DeepEP (github.com/deepseek-ai/DeepEP), which Megatron-LM and NeMo AutoModel use. `reached(n)` is the mean number of
    parts with one of a token's experts, if the experts are divided into n equal parts. Returning the results takes
    equally long.
    """
    members = group.members(fabric)
    nodes = group.size / members
    inside = reached(np.asarray(group.size, dtype=float)) * (members - 1) / members * size / fabric.link
    outside = reached(nodes) * (nodes - 1) / nodes * size / (fabric.network / fabric.gpus)
    slower: Array = np.maximum(inside, outside)
    return slower + group.latency(fabric)


def point_to_point_seconds(size: Column, stride: Column, fabric: Fabric) -> Array:
    """Seconds to send `size` bytes to the device `stride` positions further. Between nodes, all devices of a node send
    at once.
    """
    crosses = np.asarray(stride, dtype=float) >= fabric.gpus
    rate = np.where(crosses, fabric.network / fabric.gpus, fabric.link)
    seconds: Array = size / rate + np.where(crosses, fabric.network_latency, fabric.link_latency)
    return seconds


# checkpoint-engine's benchmark (README, vLLM 0.10.2): GLM-4.5-Air (213 GB) 3.47 s and Qwen3-235B-A22B (470 GB) 6.22 s
# on eight H800 give 1.2 s and 93 GB/s; DeepSeek-V3.1 (689 GB) 11.33 s and Kimi-K2 (1.03 TB) 16.04 s on 256 H20 give
# 1.2 s and 68-69 GB/s. Every engine receives all weights and copies its shards, at any tp.
UPDATE_START = 1.2
UPDATE_RATE = 68e9
HOST_LINK = 25e9  # bytes/s of a device to and from host memory, in both directions at once: achieved by PCIe 4 x16


@dataclass(frozen=True, slots=True)
class WeightSync:
    """Cost of a weight update: `publish` seconds from the optimiser's end until engines have the weights; `stall`
    seconds of pause of an engine, which are part of `publish`.
    """

    publish: float
    stall: float


def weight_sync(weight_bytes: float, trainer_nodes: float, engine_nodes: float, fabric: Fabric) -> WeightSync:
    """Cost of sending `weight_bytes` from the nodes that train to the nodes that generate, and of loading them.

    Trainers send their shards without gathering them first. Engine nodes forward them in a pipelined chain (van de
    Geijn 1994), so each byte leaves the trainers once and enters every engine node once. Engines load while they
    receive, and the slower of the two counts. With `engine_nodes` 0, weights stay inside the node.
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
    """Seconds to move the KV of `tokens` tokens between two engines of `devices` devices each, which share the bytes.

    `kv_bytes_per_token` covers all layers and heads. Between nodes, each device has its share of the node's network. A
    move pays if it takes less than prefilling the tokens again.
    """
    rate = fabric.link if same_node else fabric.network / fabric.gpus
    latency = fabric.link_latency if same_node else fabric.network_latency
    return latency + tokens * kv_bytes_per_token / (devices * rate)


def handover_pays(profile: DeviceProfile, tokens: float) -> bool:
    """Whether transferring the KV of `tokens` tokens takes less engine time than prefilling them again.

    Both times are measured on the engines of a run. A transfer also waits for the current iteration of the source.
    """
    handover = profile.handover
    if handover is None:
        return False
    handed = handover.fixed + tokens * handover.per_token + profile.engine.step
    return handed < tokens * profile.engine.per_prefill_token


def colocated_switch_seconds(leaving: float, arriving: float) -> float:
    """Seconds for devices to switch between generation and training.

    First `leaving` bytes per device go to host memory, then `arriving` bytes come from it. An engine has no leaving
    bytes, since the host has its weights and its KV is dropped; a trainer moves its stored weights and optimiser state.
    Leaving bytes make room for arriving ones, so the transfers do not overlap.
    """
    if leaving < 0 or arriving < 0:
        raise ValueError(f"leaving is {leaving}, arriving {arriving}; sizes are 0 or more")
    return UPDATE_START + (leaving + arriving) / HOST_LINK
