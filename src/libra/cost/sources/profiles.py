"""Profiles of engines on each class of nodes: from tables, a calibration, or the GPU's roofline.

Invariant: a profile from tables is cached in a file with the same numbers; an unreadable cache file is made again. A
roofline is the last choice, and every profile names its source.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from libra.config.cache import cache_directory, cache_key
from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError
from libra.cost import grid, lines, transfer
from libra.cost.afd import StageGrid
from libra.cost.grid import EngineProfile
from libra.cost.host import NAMED_HOSTS, NO_HOST, HostCost, named_host
from libra.cost.kernels import KernelTerms, default_terms
from libra.cost.quantization import Quantization, rollout_quantization
from libra.cost.sources import rates, roofline
from libra.cost.sources import tables as aiconfigurator
from libra.cost.sources.files import load_calibration, load_fit, load_grid, save_grid
from libra.cost.sources.rates import Calibration
from libra.cost.sources.roofline import engine_degrees, node_roofline, stage_roofline
from libra.cost.sources.tables import NoTablesError, stage_tables, tables
from libra.hardware import gpus
from libra.hardware.attention import Attention
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec

_LEAST_SHARE = 0.05  # of the data sheet's FLOP/s: GPUs exceed it in matrix products, CPUs do not


def engine_profiles(
    cluster: Cluster,
    model: ModelSpec,
    recipe: Recipe,
    source: str = "auto",
    note: Callable[[str], None] = lambda _: None,
    host: str = "none",
) -> tuple[EngineProfile, ...]:
    """One profile for each class of nodes, in their order.

    `host` is added to the kernels: `none`, a named host (`default` or `fast`), or a file of a fit to measurements
    (`save_fit`).

    `source` is `tables` (aiconfigurator-core), `roofline`, the calibration file of a GPU, or `auto`: tables if they are
    installed and have the GPU and model, otherwise the roofline, with the reason as a `note`. Raises `ConfigError` if
    the named source lacks the times.
    """
    added = host_part(host, model, note)
    kernels = (_profile(nodes, model, recipe, source, note) for nodes in cluster.nodes)
    return tuple(profile if added is None else profile.beside(*added) for profile in kernels)


def stage_profile(
    nodes: NodeClass,
    model: ModelSpec,
    recipe: Recipe,
    source: str,
    host: str,
    tp: int,
    ffn: int,
    note: Callable[[str], None] = lambda _: None,
    ffn_gpu: GPU | None = None,
) -> tuple[StageGrid, HostCost]:
    """Stage times with attention on ranks of `tp` GPUs of these nodes and FFN on `ffn` GPUs, and the host, from the
    sources of `engine_profiles`. Raises like `engine_profiles`, and ValueError if a degree does not divide the
    model.
    """
    stages = _stages(nodes, model, recipe, tp, ffn, source, note, ffn_gpu)
    added = host_part(host, model, note)
    if added is None:
        return stages, NO_HOST
    return replace(stages, attention=replace(stages.attention, terms=added[1])), added[0]


def _stages(
    nodes: NodeClass,
    model: ModelSpec,
    recipe: Recipe,
    tp: int,
    ffn: int,
    source: str,
    note: Callable[[str], None],
    ffn_gpu: GPU | None,
) -> StageGrid:
    quantization = rollout_quantization(recipe)
    if source in ("auto", "tables"):
        try:
            return stage_tables(nodes.gpu, model, tp, ffn, ffn_gpu=ffn_gpu, quantization=quantization)
        except NoTablesError as error:
            if source == "tables":
                raise ConfigError(f"--profile tables: nodes {nodes.name}: {error.asked}") from None
            note(f"{nodes.name}: times of attention and FFN are the roofline's: {error}")
    calibration = calibration_of(nodes, source, note)
    return stage_roofline(
        nodes.gpu, model, tp, ffn, ffn_gpu=ffn_gpu, quantization=quantization, calibration=calibration
    )


def host_part(host: str, model: ModelSpec, note: Callable[[str], None]) -> tuple[HostCost, KernelTerms] | None:
    """The host and the corrections of kernels that `host` names; None for `none`. Raises `ConfigError`."""
    if host == "none":
        return None
    if host in NAMED_HOSTS:
        plain = model.count(lambda kind: isinstance(kind.mixer, Attention) and kind.mixer.qk_norm == "none")
        return named_host(host, model.layers, plain), default_terms(model.layers)
    try:
        fit = load_fit(Path(host))
    except ConfigError as error:
        raise ConfigError(f"--host {error}") from None
    note(f"the host and corrections of kernels are {fit.host.source}")
    return fit.host, fit.terms


def _profile(
    nodes: NodeClass, model: ModelSpec, recipe: Recipe, source: str, note: Callable[[str], None]
) -> EngineProfile:
    if source in ("auto", "tables"):
        try:
            return _tables(nodes, model, recipe)
        except NoTablesError as error:
            if source == "tables":
                raise ConfigError(f"--profile tables: nodes {nodes.name}: {error.asked}") from None
            note(f"{nodes.name}: engine times are the roofline's: {error}")
    return node_roofline(nodes, model, recipe, calibration_of(nodes, source, note))


def calibration_of(nodes: NodeClass, source: str, note: Callable[[str], None]) -> Calibration | None:
    """The calibration of these nodes' GPU if `source` is a file; otherwise None. Raises `ConfigError`."""
    if source in ("auto", "tables", "roofline"):
        return None
    try:
        calibration = load_calibration(Path(source))
    except ConfigError as error:
        raise ConfigError(f"--profile {error}") from None
    _require_same_device(calibration, nodes, source)
    note(f"{nodes.name}: engine times are a roofline with the rates measured on {calibration.device}")
    return calibration


def _require_same_device(calibration: Calibration, nodes: NodeClass, source: str) -> None:
    """Raise `ConfigError` unless the calibration is for the nodes' GPU, by name (`NVIDIA A100-SXM4-40GB` is A100-40GB).
    If Libra knows neither name, the rates must be within the GPU's data sheet.
    """
    gpu = nodes.gpu

    def named(name: str) -> bool:
        words = (rf"\b{re.escape(word)}\b" for word in name.split("-"))
        return all(re.search(word, calibration.device, re.IGNORECASE) for word in words)

    known = max(filter(named, GPUS), key=len, default=None)  # the longest name is the most specific
    same = known == gpu.name if gpu.name in GPUS else named(gpu.name)
    if not same and gpu.name not in GPUS and known is None:
        same = _LEAST_SHARE * gpu.flops <= calibration.linear_flops.median <= gpu.flops
    if not same:
        raise ConfigError(
            f"--profile {source}: it was measured on {calibration.device}, and nodes {nodes.name} have {gpu.name}:"
            f" calibrate on {gpu.name}, or give --profile roofline"
        )


def _tables(nodes: NodeClass, model: ModelSpec, recipe: Recipe) -> EngineProfile:
    quantization = rollout_quantization(recipe)
    degrees = engine_degrees(model, nodes, recipe)
    if degrees and degrees[-1] > nodes.gpus:
        raise NoTablesError(f"no node can hold {model.name}, and kernel tables cover single nodes only")
    try:
        installed = version("aiconfigurator-core")
    except PackageNotFoundError:
        installed = "none"
    asked = [
        asdict(nodes.gpu),
        nodes.intra_bandwidth,
        asdict(model),
        quantization.name(model),
        degrees,
        installed,
        _code(),
    ]
    key = cache_key(asked)
    cached = cache_directory() / "grids" / f"{nodes.gpu.name}-{key}.json"
    if cached.is_file():
        try:
            return load_grid(cached)
        except ConfigError:
            cached.unlink(missing_ok=True)  # another process may have removed it
    found = _known_degrees(nodes, model, quantization, degrees)
    try:
        save_grid(cached, found)
    except OSError:
        pass  # without a cache, the next run makes the grid again
    return found


@cache
def _code() -> str:
    """A digest of the code that makes grids from tables, which invalidates caches of other versions."""
    makers = (aiconfigurator, gpus, transfer, grid, lines, rates, roofline)
    return hashlib.sha256("".join(inspect.getsource(module) for module in makers).encode()).hexdigest()


def _known_degrees(
    nodes: NodeClass, model: ModelSpec, quantization: Quantization, degrees: Sequence[int]
) -> EngineProfile:
    """The profile of the degrees for which the tables have kernels. Raises the last `NoTablesError` if no degree has
    kernels.
    """
    known: list[EngineProfile] = []
    missing: NoTablesError | None = None
    for tp in degrees:
        try:
            known.append(
                tables(nodes.gpu, model, [tp], quantization=quantization, intra_bandwidth=nodes.intra_bandwidth)
            )
        except NoTablesError as error:
            missing = error
    if not known:
        raise missing or NoTablesError(f"no tensor-parallel degree suits {model.name} on {nodes.name}")
    return replace(known[0], engines=tuple(grid for profile in known for grid in profile.engines))
