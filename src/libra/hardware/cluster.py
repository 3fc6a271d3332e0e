"""The hardware there is: GPUs, nodes, clusters.

Invariant: every GPU known by name carries data-sheet numbers and their source; a cluster is checked when it is made,
so whatever holds one need not doubt its units. Sizes are bytes, rates are bytes or FLOP per second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from libra.config.units import rate
from libra.config.yaml_file import unknown
from libra.hardware.loan_terms import LoanTerms

_MIB, _GIB = 2.0**20, 2.0**30
_VISIBLE = 0.987  # of what the driver reports, as on L40S and RTX 3090: the context takes the rest
_LEAST_REPORTED = 0.93  # of the memory in a GPU's name: the driver keeps some, error correction of GDDR6 a sixteenth

# What no GPU or network of today comes near. A value outside was given in another unit.
_GPU_RANGES = {
    "memory": (1e9, 4e12),
    "bandwidth": (1e10, 1e14),  # of GDDR on a small card, to ten stacks of HBM
    "flops": (1e12, 1e17),
    "link": (1e9, 2e12),
}
_INTRA = (8e9, 2e12)  # PCIe 3 with 8 lanes, to twice NVLink 5; bytes/s per GPU
_INTER = (1e9 / 8, 8 * 1.6e12 / 8)  # one 1 Gb/s port, to a 1.6 Tb/s port for each of eight GPUs; bytes/s per node


def _require_name(name: str) -> None:
    if not name.strip():
        raise ValueError("name is empty; give one")


def _require_link(field: str, value: float, between: tuple[float, float], owner: str) -> None:
    low, high = between
    if low <= value <= high:
        return
    # Whoever confuses bits and bytes is off by eight.
    meant = next((v for v in (value / 8, value * 8) if low <= v <= high), None)
    hint = f"; was {rate(meant)} meant?" if meant is not None else ""
    raise ValueError(
        f"{field} is {rate(value)}; the link of {owner} has {rate(low)} to {rate(high)} in one direction: check the"
        f" unit (b is a bit, B a byte){hint}"
    )


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator, by its data sheet. Raises ValueError where a number is one that no accelerator has."""

    name: str
    memory: float  # bytes of device memory
    bandwidth: float  # bytes/s of device memory
    flops: float  # dense bf16 FLOP/s, without sparsity
    link: float  # bytes/s to its neighbours in the node, one direction (NVLink or PCIe): half the advertised sum
    source: str
    visible: float | None = None  # bytes of memory that PyTorch reports; None: not known

    def __post_init__(self) -> None:
        _require_name(self.name)
        for field, (low, high) in _GPU_RANGES.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise ValueError(f"{field} is {value:g}; a GPU has {low:g} to {high:g}: check its unit")

    @property
    def usable(self) -> float:
        """Bytes of memory as PyTorch reports them, of which engines take their share."""
        return _VISIBLE * self.memory if self.visible is None else self.visible

    @property
    def is_hopper(self) -> bool:
        """Whether kernels that are made for Hopper run on it, by its name."""
        return self.name in ("H100", "H800", "H200")


# Speeds are without sparsity, with which data sheets double them. Memory is what the driver reports: a data sheet's
# gigabytes are binary ones, less what error correction and the driver take (nvidia-smi: A100 81,920 MiB, H100 81,559,
# H200 143,771, B200 183,359, L40S 46,068, L4 23,034, A100-40GB 40,960). `visible` is what PyTorch reports of it in
# public logs of vLLM: A100 79.15-79.25 GiB, A100-40GB 39.38-39.49, H100 79.18-79.19, H200 139.8, L40S 44.39-44.42.
_A100 = GPU(
    name="A100",
    memory=81_920 * _MIB,
    visible=79.2 * _GIB,
    bandwidth=2.039e12,
    flops=312e12,
    link=300e9,
    source="NVIDIA A100 80GB SXM4 data sheet (2021): 80 GB HBM2e, 2,039 GB/s, 312 TFLOP/s bf16, NVLink 3 600 GB/s",
)
_H100 = GPU(
    name="H100",
    memory=81_559 * _MIB,
    visible=79.18 * _GIB,
    bandwidth=3.35e12,
    flops=989e12,
    link=450e9,
    source="NVIDIA H100 SXM5 data sheet (2023): 80 GB HBM3, 3.35 TB/s, 989 TFLOP/s bf16, NVLink 4 900 GB/s",
)

GPUS: Mapping[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        _A100,
        replace(
            _A100,
            name="A100-40GB",
            memory=40_960 * _MIB,
            visible=39.4 * _GIB,
            bandwidth=1.555e12,
            source="NVIDIA A100 40GB SXM4 data sheet (2021): 40 GB HBM2, 1,555 GB/s, 312 TFLOP/s bf16, NVLink 3",
        ),
        replace(_A100, name="A800", link=200e9, source=f"{_A100.source}; A800 has NVLink 400 GB/s"),
        _H100,
        replace(_H100, name="H800", link=200e9, source=f"{_H100.source}; H800 has NVLink 400 GB/s"),
        GPU(
            name="H200",
            memory=143_771 * _MIB,
            visible=139.8 * _GIB,
            bandwidth=4.8e12,
            flops=989e12,
            link=450e9,
            source="NVIDIA H200 SXM data sheet (2024): 141 GB HBM3e, 4.8 TB/s, 989 TFLOP/s bf16, NVLink 4 900 GB/s",
        ),
        GPU(
            name="B200",
            memory=183_359 * _MIB,
            bandwidth=7.7e12,
            flops=2.25e15,
            link=900e9,
            source="NVIDIA HGX B200 data sheet (2025): 180 GB HBM3e, 7.7 TB/s, 2.25 PFLOP/s bf16, NVLink 5 1.8 TB/s",
        ),
        GPU(
            name="L4",
            memory=23_034 * _MIB,
            bandwidth=300e9,
            flops=121e12,
            link=32e9,
            source="NVIDIA L4 data sheet (2023): 24 GB GDDR6, 300 GB/s, 121 TFLOP/s bf16, PCIe 4 x16 64 GB/s",
        ),
        GPU(
            name="L40S",
            memory=46_068 * _MIB,
            visible=44.4 * _GIB,
            bandwidth=864e9,
            flops=362.05e12,
            link=32e9,
            source="NVIDIA L40S data sheet (2023): 48 GB GDDR6, 864 GB/s, 362 TFLOP/s bf16, PCIe 4 x16 64 GB/s",
        ),
    )
}

_FORM = re.compile(r"nvidia|tesla|gpu|sxm\d?|hgx|dgx")  # words that name no other GPU than the one without them
_MEMORY = re.compile(r"(\d+)\s*gi?b\b")


def nearest_gpu(given: str) -> str | None:
    """The known GPU that is written differently in `given`; never one with another memory, link or chip.

    >>> [nearest_gpu(name) for name in ("NVIDIA H100 SXM5 80GB", "h-200", "H100 PCIe", "A30", "H200 80GB")]
    ['H100', 'H200', None, None, None]
    """
    text = _FORM.sub("", given.casefold())
    memory = _MEMORY.search(text)
    for name, gpu in GPUS.items():
        if _letters(text) == _letters(name):
            return name
        if memory is not None and _letters(_MEMORY.sub("", text)) == _letters(name):
            size = float(memory[1]) * 2.0**30
            if gpu.memory <= size <= gpu.memory / _LEAST_REPORTED:
                return name
    return None


def _letters(name: str) -> str:
    """Letters and digits of a name, in lower case."""
    return "".join(filter(str.isalnum, name.casefold()))


MOST_NODES = 100_000  # of one class
MOST_GPUS = 1_024  # of one node: racks are built with 72


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Identical nodes. Raises ValueError where a count or a bandwidth is one that no cluster has."""

    name: str
    count: int  # nodes
    gpus: int  # per node
    gpu: GPU
    intra_bandwidth: float  # bytes/s per GPU inside a node, one direction
    inter_bandwidth: float  # bytes/s per node to other nodes, one direction

    def __post_init__(self) -> None:
        _require_name(self.name)
        for field, value, most in (("count", self.count, MOST_NODES), ("gpus", self.gpus, MOST_GPUS)):
            if value < 1:
                raise ValueError(f"{field} is {value}; set it to 1 or more, or leave the nodes out")
            if value > most:
                raise ValueError(f"{field} is {value:,}; no class of nodes has more than {most:,}: check it")
        _require_link("intra_bandwidth", self.intra_bandwidth, _INTRA, "a GPU")
        _require_link("inter_bandwidth", self.inter_bandwidth, _INTER, "a node")
        if self.intra_bandwidth > self.gpu.link:
            raise ValueError(
                f"intra_bandwidth is {rate(self.intra_bandwidth)}, but {self.gpu.name} reaches"
                f" {rate(self.gpu.link)} in one direction (data sheets add both): lower it, or leave it out"
            )

    @property
    def devices(self) -> int:
        return self.count * self.gpus


@dataclass(frozen=True, slots=True)
class ServingPool:
    """GPUs that serve users. Raises ValueError where engines as the terms have them do not divide a node."""

    nodes: NodeClass
    lends: LoanTerms | None = None  # None: nothing

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
    """All nodes that train and generate, and those that serve users. Raises ValueError when none train and generate, or
    two classes share a name."""

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
        """GPUs that train and generate; those that serve users are not among them."""
        return sum(node.devices for node in self.nodes)

    def node_class(self, name: str) -> NodeClass:
        """The class called `name`. Raises ValueError naming the nearest one there is."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ValueError(unknown("class of nodes", name, [node.name for node in self.nodes]))

    def serving_pool(self, name: str) -> ServingPool:
        """The serving pool called `name`. Raises ValueError naming the nearest one there is."""
        for pool in self.serving:
            if pool.name == name:
                return pool
        raise ValueError(unknown("serving pool", name, [pool.name for pool in self.serving]))


def override(cluster: Cluster, counts: Mapping[str, int]) -> Cluster:
    """The cluster with other numbers of nodes, by class or serving pool; 0 takes it away. Raises ValueError."""
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
    """The cluster with as many nodes as `gpus` GPUs fill. Raises ValueError where that is not a number of whole nodes,
    or the cluster has several classes of nodes and the number does not say which to change."""
    if len(cluster.nodes) > 1:
        names = ", ".join(f"{node.name}={node.count}" for node in cluster.nodes)
        raise ValueError(f"gpus is {gpus}, but there are several classes of nodes; give nodes by class, as in {names}")
    node = cluster.nodes[0]
    if gpus < 1 or gpus % node.gpus:
        raise ValueError(f"gpus is {gpus}; nodes of {node.name!r} have {node.gpus}: give a positive multiple of it")
    return override(cluster, {node.name: gpus // node.gpus})
