"""Nodes and clusters of GPUs.

Invariant: a cluster is checked at construction, so its users need not check units. Sizes are in bytes, rates in bytes
or FLOP per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from libra.config.rooms import OfRoom
from libra.config.units import rate
from libra.config.yaml_file import unknown
from libra.hardware.gpu import GPU as GPU
from libra.hardware.gpus import GPUS as GPUS
from libra.hardware.gpus import nearest_gpu as nearest_gpu

# Limits far beyond present networks. A value outside them must be in another unit.
_INTRA = (8e9, 2e12)  # bytes/s per GPU, from PCIe 3 with 8 lanes to twice NVLink 5
_PORTS = (1e9 / 8, 1.6e12 / 8)  # bytes/s, from one 1 Gb/s port per node to one 1.6 Tb/s port per GPU


def _require_name(name: str) -> None:
    if not name.strip():
        raise ValueError("name is empty; give one")


def _require_link(field: str, value: float, between: tuple[float, float], owner: str) -> None:
    low, high = between
    if low <= value <= high:
        return
    # A value in bits instead of bytes, or the reverse, is wrong by a factor of eight.
    meant = next((v for v in (value / 8, value * 8) if low <= v <= high), None)
    hint = f"; was {rate(meant)} meant?" if meant is not None else ""
    raise ValueError(
        f"{field} is {rate(value)}; the link of {owner} has {rate(low)} to {rate(high)} in one direction: check the"
        f" unit (b is a bit, B a byte){hint}"
    )


MOST_NODES = 100_000  # in one class
MOST_GPUS = 1_024  # in one node; racks have 72
MOST_COST = 1_000.0  # dollars per GPU and hour; a higher cost is that of a month or a year


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Identical nodes. Raises `ValueError` for an impossible count or bandwidth."""

    name: str
    count: int  # nodes
    gpus: int  # per node
    gpu: GPU
    intra_bandwidth: float  # bytes/s per GPU inside a node, one direction
    inter_bandwidth: float  # bytes/s per node to other nodes, one direction
    cost_per_hour: float | None = None  # dollars per node; None: unknown

    def __post_init__(self) -> None:
        _require_name(self.name)
        for field, value, most in (("count", self.count, MOST_NODES), ("gpus", self.gpus, MOST_GPUS)):
            if value < 1:
                raise ValueError(f"{field} is {value}; set it to 1 or more, or leave the nodes out")
            if value > most:
                raise ValueError(f"{field} is {value:,}; at most {most:,} are allowed: check the number")
        if self.cost_per_hour is not None and not 0 < self.cost_per_hour <= MOST_COST * self.gpus:
            raise ValueError(
                f"cost_per_hour is {self.cost_per_hour:g}; a node costs more than $0 and at most ${MOST_COST:g} an hour"
                " for each of its GPUs: check the number"
            )
        _require_link("intra_bandwidth", self.intra_bandwidth, _INTRA, "a GPU")
        ports = _PORTS[0], max(8, self.gpus) * _PORTS[1]
        _require_link("inter_bandwidth", self.inter_bandwidth, ports, "a node")
        if self.intra_bandwidth > self.gpu.link:
            raise ValueError(
                f"intra_bandwidth is {rate(self.intra_bandwidth)}, but {self.gpu.name} reaches"
                f" {rate(self.gpu.link)} in one direction (data sheets add both): lower it, or leave it out"
            )

    @property
    def devices(self) -> int:
        return self.count * self.gpus


class PoolTerms(Protocol):
    """The terms on which a pool lends its GPUs. Lending defines the class."""

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs of one serving engine."""
        ...


@dataclass(frozen=True, slots=True)
class ServingPool:
    """GPUs that serve users. Raises `ValueError` if the engine size in the loan terms does not divide a node."""

    nodes: NodeClass
    lends: Annotated[PoolTerms, OfRoom("loan terms")] | None = None  # None: the pool lends no GPU

    def __post_init__(self) -> None:
        if self.lends is not None and self.nodes.gpus % self.lends.tensor_parallel_size:
            raise ValueError(
                f"lends.tensor_parallel_size is {self.lends.tensor_parallel_size}; it must divide the"
                f" {self.nodes.gpus} GPUs of a node"
            )

    @property
    def name(self) -> str:
        return self.nodes.name


@dataclass(frozen=True, slots=True)
class Cluster:
    """All nodes for training and rollout, and the pools that serve users. Raises `ValueError` without a node for
    training and rollout, and if two classes have the same name.
    """

    nodes: tuple[NodeClass, ...]
    serving: tuple[ServingPool, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("nodes is empty; a cluster has at least one node: give 1 or more")
        names = [node.name for node in self.nodes] + [pool.name for pool in self.serving]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"name {name!r} is given to two classes of nodes; name each once")

    @property
    def devices(self) -> int:
        """Number of GPUs for training and rollout, without GPUs that serve users."""
        return sum(node.devices for node in self.nodes)

    @property
    def cost_per_hour(self) -> float | None:
        """Dollars per hour of all nodes for training and rollout; None if the cost of a class is unknown."""
        costs = [node.count * node.cost_per_hour for node in self.nodes if node.cost_per_hour is not None]
        return sum(costs) if len(costs) == len(self.nodes) else None

    def node_class(self, name: str) -> NodeClass:
        """The class called `name`. Raises `ValueError` with the nearest known name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ValueError(unknown("class of nodes", name, [node.name for node in self.nodes]))

    def serving_pool(self, name: str) -> ServingPool:
        """The serving pool called `name`. Raises `ValueError` with the nearest known name."""
        for pool in self.serving:
            if pool.name == name:
                return pool
        raise ValueError(unknown("serving pool", name, [pool.name for pool in self.serving]))


def override(cluster: Cluster, counts: Mapping[str, int]) -> Cluster:
    """The cluster with other numbers of nodes, by class or serving pool; 0 removes it. Raises `ValueError` for an
    unknown name or a negative number.
    """
    serving = {pool.name for pool in cluster.serving}
    for name, count in counts.items():
        if name not in serving:
            cluster.node_class(name)
        if count < 0:
            raise ValueError(f"{name} is {count} nodes; set it to 0 or more")

    def changed(nodes: NodeClass) -> NodeClass:
        return replace(nodes, count=counts[nodes.name]) if counts.get(nodes.name) else nodes

    return replace(
        cluster,
        nodes=tuple(changed(nodes) for nodes in cluster.nodes if counts.get(nodes.name) != 0),
        serving=tuple(
            replace(pool, nodes=changed(pool.nodes)) for pool in cluster.serving if counts.get(pool.name) != 0
        ),
    )


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """The cluster with the number of nodes that has `gpus` GPUs. Raises `ValueError` if the GPUs are not whole nodes,
    or if the cluster has several classes of nodes.
    """
    if len(cluster.nodes) > 1:
        names = ", ".join(f"{node.name}={node.count}" for node in cluster.nodes)
        raise ValueError(f"gpus is {gpus}, but there are several classes of nodes; give nodes by class, as in {names}")
    node = cluster.nodes[0]
    if gpus < 1 or gpus % node.gpus:
        raise ValueError(
            f"gpus is {gpus}; nodes of {node.name!r} have {node.gpus}: give a positive multiple of this number"
        )
    return override(cluster, {node.name: gpus // node.gpus})


def with_gpu(cluster: Cluster, gpu: GPU) -> Cluster:
    """The cluster with another GPU in the same nodes, whose cost is then unknown. A link with the old GPU's speed gets
    the new GPU's speed; another link keeps its speed, up to that of the new GPU. Raises `ValueError` if there are
    several classes of nodes.
    """
    if len(cluster.nodes) > 1:
        names = ", ".join(node.name for node in cluster.nodes)
        raise ValueError(
            f"gpu is {gpu.name}, but there are several classes of nodes ({names}); change the cluster file"
        )
    node = cluster.nodes[0]
    linked = gpu.link if node.intra_bandwidth == node.gpu.link else min(node.intra_bandwidth, gpu.link)
    return replace(cluster, nodes=(replace(node, gpu=gpu, intra_bandwidth=linked, cost_per_hour=None),))
