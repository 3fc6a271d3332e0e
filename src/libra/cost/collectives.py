"""Seconds of collective operations, by latency and bandwidth.

Invariant: a group is charged for the slowest link it crosses, and shares its node's network with every other group
that crosses it at the same time. Sizes are bytes, rates bytes/s of one direction. Arguments may be numpy columns.

The model is alpha + beta * n with the steps of Thakur, Rabenseifner and Gropp 2005 (Optimization of collective
communication operations in MPICH, IJHPCA 19:1): a ring inside the node, recursive doubling between nodes. Bandwidth
terms are those of a ring, (p - 1) / p of the bytes through every link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from libra.hardware.cluster import NodeClass
from libra.hardware.parallel import Array

Column = Array | float

# Bus bandwidth that all-reduce was measured to reach among eight GPUs, as a share of one direction of NVLink:
# A100 186 of 300 GB/s, A800 142-155 of 200, H100 370 of 450 (nccl-tests). Others take the lowest of these.
BUS_SHARE = {"A100": 0.62, "A800": 0.74, "H100": 0.82, "H800": 0.74, "H200": 0.82}
# Assumed: what NCCL gets out of RoCE or InfiniBand of the stated speed.
NETWORK_SHARE = 0.9
# An all-reduce of 8 KiB among eight A100 takes about 25 us: 14 steps of a ring.
LINK_LATENCY = 1.8e-6
NETWORK_LATENCY = 5e-6  # assumed, per hop between nodes, host-side proxy included


@dataclass(frozen=True, slots=True)
class Fabric:
    """What connects devices: `link` among those of a node, `network` of one node to the others, both as achieved."""

    gpus: int  # per node
    link: float  # bytes/s per device, one direction
    network: float  # bytes/s per node, one direction; shared by its devices
    link_latency: float = LINK_LATENCY
    network_latency: float = NETWORK_LATENCY


def fabric(nodes: NodeClass) -> Fabric:
    """The fabric of a class of nodes, at the cited shares of its nominal bandwidths."""
    share = BUS_SHARE.get(nodes.gpu.name, min(BUS_SHARE.values()))
    return Fabric(nodes.gpus, nodes.intra_bandwidth * share, nodes.inter_bandwidth * NETWORK_SHARE)


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that communicate: `size` of them, `stride` apart in the order in which nodes are filled."""

    size: Column
    stride: Column = 1.0

    def members(self, fabric: Fabric) -> Array:
        """How many of a node's devices are in one group."""
        per_node: Array = np.maximum(1.0, fabric.gpus // np.asarray(self.stride, dtype=float))
        return np.minimum(self.size, per_node)

    def bandwidth(self, fabric: Fabric) -> Array:
        """Bytes/s that a ring over the group moves. Groups that interleave in a node divide its network."""
        members = self.members(fabric)
        shared = np.minimum(fabric.link, fabric.network * members / fabric.gpus)
        return np.where(self.size > members, shared, fabric.link)

    def latency(self, fabric: Fabric) -> Array:
        members = self.members(fabric)
        nodes = np.ceil(self.size / members)
        seconds: Array = (members - 1) * fabric.link_latency + np.ceil(np.log2(nodes)) * fabric.network_latency
        return seconds


def all_gather_seconds(size: Column, group: Group, fabric: Fabric) -> Array:
    """Every device ends with all `size` bytes, of which it had its share."""
    return (group.size - 1) / group.size * size / group.bandwidth(fabric) + group.latency(fabric)


def reduce_scatter_seconds(size: Column, group: Group, fabric: Fabric) -> Array:
    """Every device starts with `size` bytes and ends with its share of their sum."""
    return all_gather_seconds(size, group, fabric)


def all_reduce_seconds(size: Column, group: Group, fabric: Fabric) -> Array:
    """Every device starts with `size` bytes and ends with their sum: reduce-scatter, then all-gather."""
    return 2 * all_gather_seconds(size, group, fabric)


def all_to_all_seconds(size: Column, group: Group, fabric: Fabric) -> Array:
    """Every device sends `size` bytes in all, an equal part to each device of the group (itself included)."""
    members = group.members(fabric)
    inside = (members - 1) / group.size * size / fabric.link
    outside = (group.size - members) / group.size * size / (fabric.network / fabric.gpus)
    slower: Array = np.maximum(inside, outside)
    return slower + group.latency(fabric)


def point_to_point_seconds(size: Column, stride: Column, fabric: Fabric) -> Array:
    """`size` bytes from one device to that `stride` further. From node to node, all devices of a node send at once."""
    crosses = np.asarray(stride, dtype=float) >= fabric.gpus
    rate = np.where(crosses, fabric.network / fabric.gpus, fabric.link)
    seconds: Array = size / rate + np.where(crosses, fabric.network_latency, fabric.link_latency)
    return seconds
