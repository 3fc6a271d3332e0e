"""Offered clusters, written as in `h100:8..64,b200:8..32`.

Invariant: an offer is a cluster of whole nodes of one class. The class comes from the cluster file, or is the usual
cloud node of a known GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from libra.config.units import rate
from libra.hardware.cluster import Cluster, NodeClass
from libra.hardware.cluster_file import gpu_of
from libra.hardware.gpu import GPU
from libra.hardware.gpus import record_of

MOST_SIZES = 8  # compared sizes of one class, each of which needs a plan
_NODE = 8  # GPUs in a node that no file describes
_NVLINK = 150e9  # bytes/s; slower links are PCIe
# Network of such nodes in bytes/s per GPU: 200 Gb/s with A100 (Azure ND A100 v4), 400 Gb/s with H100 and later GPUs
# (AWS p5, Azure ND H100 v5), 50 Gb/s with GPUs without NVLink (AWS g6e).
_EARLIER, _LATER, _WITHOUT = 200e9 / 8, 400e9 / 8, 50e9 / 8
_OFFER = re.compile(r"\s*([^:]+?)\s*:\s*(\d+)(?:\.\.(\d+))?\s*")


def parse_offers(text: str, file: Cluster | None, costs: Mapping[str, float]) -> tuple[tuple[Cluster, ...], list[str]]:
    """The clusters of `text`, and notes on assumptions about them.

    `text` lists NAME:GPUS or NAME:FIRST..LAST, where NAME is a class of nodes in `file`, or a known GPU. `costs` are
    dollars per GPU and hour, by name, and replace those of the file. Raises `ValueError`.
    """
    clusters: list[Cluster] = []
    notes = (
        [f"{pool.name} serves users: no offer contains this pool, or its loans" for pool in file.serving]
        if file
        else []
    )
    of_gpu = {name.casefold(): cost for name, cost in costs.items()}
    for part in text.split(","):
        match = _OFFER.fullmatch(part)
        if match is None:
            raise ValueError(f"{part.strip()!r} is not an offer; give NAME:GPUS or NAME:FIRST..LAST, as in h100:8..64")
        name, first, last = match[1], int(match[2]), int(match[3] or match[2])
        if not 0 < first <= last:
            raise ValueError(f"{part.strip()}: give at least 1 GPU, and the smaller number first")
        nodes = _class_of(file, name)
        if nodes is None:
            nodes = _rented(name, first, last)
            notes.append(
                f"{name}: nodes of {nodes.gpus} {nodes.gpu.name} with {rate(nodes.inter_bandwidth)} to other "
                f"nodes are assumed; give a cluster file to change this"
            )
        if (cost := of_gpu.get(name.casefold())) is not None:
            nodes = replace(nodes, cost_per_hour=cost * nodes.gpus)
        sizes = _sizes(nodes, first, last)
        if len(sizes) < (last - first) // nodes.gpus + 1:
            notes.append(f"{name}: {', '.join(map(str, sizes))} of {first} to {last} GPUs are compared")
        clusters += (Cluster((replace(nodes, count=size // nodes.gpus),)) for size in sizes)
    named = [(it.nodes[0].name.casefold(), it.devices) for it in clusters]
    unused = [name for name in costs if name.casefold() not in dict(named)]
    if unused:
        raise ValueError(f"a cost is given for {', '.join(unused)}, which is not offered; check the name")
    twice = next((it for it in named if named.count(it) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice[1]} GPUs of {twice[0]} are offered twice; name each once")
    return tuple(clusters), notes


def _class_of(file: Cluster | None, name: str) -> NodeClass | None:
    """The class with this name in the file; None if there is none."""
    classes: Sequence[NodeClass] = () if file is None else file.nodes
    return next((it for it in classes if it.name.casefold() == name.casefold()), None)


def _rented(name: str, first: int, last: int) -> NodeClass:
    """Nodes of a known GPU. If fewer GPUs than a full node are wanted, they are one smaller node."""
    gpu = gpu_of(name, "offer")
    gpus = first if first == last < _NODE else _NODE
    return NodeClass(name, 1, gpus, gpu, gpu.link, gpus * _network(gpu))


def _network(gpu: GPU) -> float:
    if gpu.link < _NVLINK:
        return _WITHOUT
    return _EARLIER if record_of(gpu).architecture == "ampere" else _LATER


def _sizes(nodes: NodeClass, first: int, last: int) -> list[int]:
    """Numbers of GPUs in whole nodes from `first` to `last`: all, or if these are more than `MOST_SIZES`, as many in
    steps of nearly equal ratio."""
    for size in (first, last):
        if size % nodes.gpus:
            raise ValueError(
                f"{nodes.name}: {size} GPUs are not whole nodes of {nodes.gpus}; give a multiple of {nodes.gpus}"
            )
    low, high = first // nodes.gpus, last // nodes.gpus
    if high - low < MOST_SIZES:
        counts = list(range(low, high + 1))
    else:
        ratio = (high / low) ** (1 / (MOST_SIZES - 1))
        counts = sorted({round(low * ratio**power) for power in range(MOST_SIZES)})
    return [count * nodes.gpus for count in counts]
