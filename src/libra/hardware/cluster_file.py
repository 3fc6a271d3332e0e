"""The cluster file: classes of nodes, and pools that serve users.

Invariant: a file describes a possible cluster, or is refused in one line with the key and the remedy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import StrictInt

from libra.config.rooms import OfRoom
from libra.config.units import RATES, SIZES, SPEEDS, quantity, written
from libra.config.yaml_file import Section, read_section, refusal, shown, valid
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass, PoolTerms, ServingPool, nearest_gpu

_SAME = 0.1  # allowed relative difference of a GPU's figures: data sheets round, and boost clocks differ


class _GPUSection(Section):
    name: str
    memory: Any
    bandwidth: Any
    flops: Any
    link: Any
    source: str


class _NodeSection(Section):
    name: str
    count: StrictInt
    gpus: StrictInt
    gpu: Any
    inter_bandwidth: Any
    intra_bandwidth: Any = None
    cost_per_hour: float | None = None


class _TermsSection(Protocol):
    def terms(self) -> PoolTerms: ...


class _ServingSection(_NodeSection):
    lends: Annotated[_TermsSection, OfRoom("lends")] | None = None


class _ClusterSection(Section):
    nodes: tuple[_NodeSection, ...]
    serving: tuple[_ServingSection, ...] = ()


def load_cluster(path: Path | str) -> Cluster:
    """Read a cluster file, such as `examples/cluster_mixed.yaml`. Raises `ConfigError` with file, key and remedy."""
    path = Path(path)
    section = read_section(path, _ClusterSection, "examples/cluster_48_a800.yaml")
    nodes = tuple(_node_class(path, f"nodes.{i}", node) for i, node in enumerate(section.nodes))
    serving = tuple(_serving_pool(path, f"serving.{i}", pool) for i, pool in enumerate(section.serving))
    try:
        return Cluster(nodes, serving)
    except ValueError as error:
        raise refusal(path, str(error)) from None


def _serving_pool(path: Path, key: str, section: _ServingSection) -> ServingPool:
    nodes = _node_class(path, key, section)
    if section.lends is None:
        return ServingPool(nodes)
    try:
        terms = section.lends.terms()
    except ValueError as error:
        raise refusal(path, f"{key}.lends.{error}") from None
    try:
        return ServingPool(nodes, terms)
    except ValueError as error:
        raise refusal(path, f"{key}.{error}") from None


def _node_class(path: Path, key: str, section: _NodeSection) -> NodeClass:
    try:
        gpu = gpu_of(section.gpu, f"{key}.gpu")
    except ValueError as error:
        raise refusal(path, str(error)) from None
    try:
        return NodeClass(
            name=section.name,
            count=section.count,
            gpus=section.gpus,
            gpu=gpu,
            intra_bandwidth=gpu.link
            if section.intra_bandwidth is None
            else quantity("intra_bandwidth", section.intra_bandwidth, RATES),
            inter_bandwidth=quantity("inter_bandwidth", section.inter_bandwidth, RATES),
            cost_per_hour=section.cost_per_hour,
        )
    except ValueError as error:
        raise refusal(path, f"{key}.{error}") from None


def gpu_of(given: object, key: str) -> GPU:
    """The GPU that a file names or describes at `key`. Raises `ValueError` that begins with the key."""
    if isinstance(given, str):
        for name, gpu in GPUS.items():
            if name.casefold() == given.casefold():
                return gpu
        close = nearest_gpu(given)
        hint = f"did you mean {close}? Known are" if close else "known are"
        raise ValueError(
            f"{key}: unknown GPU {shown(given)}; {hint}"
            f" {', '.join(GPUS)}; describe another one by a mapping of {', '.join(_GPUSection.model_fields)}"
        )
    if not isinstance(given, dict):
        raise ValueError(f"{key}: expected a name, such as A800, or a mapping (got {shown(given)})")
    section = valid(_GPUSection, given, within=key)
    try:
        described = GPU(
            name=section.name,
            memory=quantity("memory", section.memory, SIZES),
            bandwidth=quantity("bandwidth", section.bandwidth, RATES),
            flops=quantity("flops", section.flops, SPEEDS),
            link=quantity("link", section.link, RATES),
            source=section.source,
        )
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None
    known = next((gpu for name, gpu in GPUS.items() if name.casefold() == section.name.casefold()), None)
    if known is None:
        return described
    for field in ("memory", "bandwidth", "flops", "link"):
        given, usual = getattr(described, field), getattr(known, field)
        if not (1 - _SAME) * usual <= given <= (1 + _SAME) * usual:
            raise ValueError(
                f"{key}.{field}: {known.name} has {usual:,.4g}, but this has {given:,.4g}: leave the mapping out,"
                " or choose another name"
            )
    return known


def described_gpu(gpu: GPU) -> str | dict[str, str]:
    """The value that `gpu_of` reads as this GPU: the name of a known GPU, otherwise a mapping. Raises `ValueError` for
    a known name with other numbers.
    """
    if GPUS.get(gpu.name) == gpu:
        return gpu.name
    given = {
        "name": gpu.name,
        "memory": written(gpu.memory, SIZES),
        "bandwidth": written(gpu.bandwidth, RATES),
        "flops": written(gpu.flops, SPEEDS),
        "link": written(gpu.link, RATES),
        "source": gpu.source,
    }
    gpu_of(given, "gpu")
    return given
