"""Engines as a YAML file describes them.

Invariant: a file gives a deployment that can be simulated, or is refused in one line that names the key and what would
be right. Lengths are tokens, times are seconds. What vLLM has a name for has that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError, Section, read_section, refusal, unknown
from libra.cost.engine_memory import BLOCK, kv_tokens
from libra.cost.graphs import capture_sizes
from libra.cost.grid import EngineGrid
from libra.cost.host import HostCost
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.sim.deployment import DEFAULT_DECODE_ROUTE, DEFAULT_ROUTE, Deployment, WeightUpdate
from libra.sim.engine.config import ROLES, EngineConfig, EngineSpec, FailurePolicy, RoleName, SchedulingPolicy
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, GroupSpec
from libra.sim.engine.speculative import Speculative
from libra.sim.expert_ranks import RanksSection, check_ranks, expert_bytes, group_cost
from libra.sim.kv_network import DEFAULT_LEASE, KVNetwork

_Count = Annotated[int, Field(strict=True, ge=1)]
_Index = Annotated[int, Field(strict=True, ge=0)]
_Seconds = Annotated[float, Field(ge=0)]
_Overhead = Annotated[float, Field(ge=0, le=3600)]
_Duration = Annotated[float, Field(gt=0)]
_Flag = Annotated[bool, Field(strict=True)]

_BATCHED_TOKENS = 8192
_KV_BYTES = 2  # of an element
_NODE = 8  # GPUs: the node that an engine is taken to stand in, unless it is larger
_NETWORK = 50e9  # bytes/s between nodes: an engine stays within one


class OverheadSection(Section):
    """What the CPU does for an iteration. Times of kernels do not contain it."""

    iteration: _Overhead = 0.0
    request: _Overhead = 0.0  # for each request in the iteration
    overlapped: _Flag = False  # with the GPU's work, as asynchronous scheduling does: only the longer one counts


class SpeculativeSection(Section):
    """Drafts, as vLLM's `speculative_config` has them. How many are accepted is said by one of rates, length and
    `accepted`."""

    method: str
    num_speculative_tokens: Annotated[int, Field(strict=True)]
    model: str | None = None  # with draft_model, as an engine's
    synthetic_acceptance_rates: tuple[float, ...] = ()
    synthetic_acceptance_length: float | None = None
    accepted: tuple[int, ...] = ()
    seed: _Index = 0

    def drafts(self) -> Speculative:
        """Raises ValueError that opens with the key."""
        count, length, rates = (
            self.num_speculative_tokens,
            self.synthetic_acceptance_length,
            self.synthetic_acceptance_rates,
        )
        if length is not None and (rates or self.accepted):
            raise ValueError("accepted, synthetic_acceptance_rates or synthetic_acceptance_length: give one of them")
        if length is not None:
            drafts = Speculative.of_length(self.method, count, length, self.seed)
        else:
            drafts = Speculative(self.method, count, rates, self.accepted, self.seed)
        if (self.model is None) == (self.method == "draft_model"):
            raise ValueError(
                f"model is {self.model}, and method {self.method}: name one with draft_model, and only there"
            )
        return drafts


class EngineSection(RanksSection):
    """`count` engines that are alike, or as many groups of ranks."""

    name: Annotated[str, Field(min_length=1)]
    count: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1
    model: str  # config.json, its directory, or a known name
    gpu: str  # a known name
    profile: str = "auto"  # where times are from: auto, tables, roofline, or a calibration file beside this one
    tensor_parallel_size: _Count = 1
    pipeline_parallel_size: _Count = 1
    quantization: Literal["fp8"] | None = None  # of the weights
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_blocks: _Count | None = None  # instead of what that leaves
    max_model_len: _Count | None = None  # None: the model's
    block_size: _Count = 16
    max_num_seqs: _Count = 256
    max_num_batched_tokens: _Count = _BATCHED_TOKENS
    enable_chunked_prefill: _Flag = True
    policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: _Flag = True
    watermark: float = 0.0
    reserve_full_prompt: _Flag = True
    capture_sizes: tuple[_Count, ...] = ()
    async_scheduling: _Flag = False
    speculative: SpeculativeSection | None = None
    role: RoleName = "colocated"
    kv_load_failure_policy: FailurePolicy = "fail"
    enforce_eager: _Flag = False  # no CUDA graphs
    host: str = "none"  # what comes to times of kernels: none, default, or a file of a fit beside this one
    overhead: OverheadSection = OverheadSection()
    bucket: _Index = 0


class UpdatesSection(Section):
    """New weights for all engines at once, again and again."""

    every: _Duration
    times: Annotated[int, Field(strict=True, ge=1, le=100_000)]
    pause: _Seconds
    refresh: _Flag = False  # contexts are computed again


class KVTransferSection(Section):
    """From the engines with role prefill to those with role decode."""

    bandwidth: Annotated[float, Field(gt=0)]  # bytes/s of each GPU's network
    latency: _Seconds = 0.0
    lease: _Duration = DEFAULT_LEASE
    local_below: _Index = 0
    route: str = DEFAULT_DECODE_ROUTE


class EnginesFile(Section):
    engines: tuple[EngineSection, ...] = Field(min_length=1)
    route: str = DEFAULT_ROUTE
    sticky: _Flag = True
    limits: tuple[_Count, ...] | None = None
    turn_tokens: _Count = 1
    kv_transfer: KVTransferSection | None = None
    weight_updates: UpdatesSection | None = None
    time_limit: _Duration | None = None


def load_engines(path: Path | str, note: Callable[[str], None] = lambda _: None) -> Deployment:
    """Read a file such as `examples/engines.yaml`; `note` is told where times are from, if not from where one would
    expect. Raises `ConfigError`."""
    path = Path(path)
    file = read_section(path, EnginesFile, "examples/engines.yaml")
    try:
        engines = []
        for index, section in enumerate(file.engines):
            engines += _engines(section, f"engines.{index}", path.parent, note)
        _check_models(file)
        updates, transfer = file.weight_updates, file.kv_transfer
        return Deployment(
            tuple(engines),
            file.limits,
            file.turn_tokens,
            file.route,
            file.sticky,
            ()
            if updates is None
            else WeightUpdate.every(updates.every, updates.times, updates.pause, refresh=updates.refresh),
            file.time_limit,
            None
            if transfer is None
            else KVNetwork(transfer.bandwidth, transfer.latency, transfer.lease, transfer.local_below),
            DEFAULT_DECODE_ROUTE if transfer is None else transfer.route,
        )
    except ValueError as error:
        raise refusal(path, str(error)) from None


def load_lender(path: Path | str, note: Callable[[str], None] = lambda _: None) -> tuple[EngineSpec, str, str]:
    """The serving engine of such a file, its model and its hardware (such as "2 x A100"). Raises `ConfigError`, also
    where the file describes several: each is certified by itself."""
    path = Path(path)
    engines = load_engines(path, note).engines
    section = read_section(path, EnginesFile, "examples/engines.yaml").engines[0]
    if len(engines) > 1:
        raise refusal(path, f"engines are {len(engines)}; a certificate is of one: give a file with a single engine")
    gpus = section.tensor_parallel_size * section.pipeline_parallel_size
    return engines[0], load_model(section.model).name, f"{gpus} x {section.gpu}"


def _engines(section: EngineSection, key: str, beside: Path, note: Callable[[str], None]) -> list[EngineSpec]:
    """Raises ValueError that opens with the key."""
    try:
        model = load_model(section.model)
    except ConfigError as error:
        raise ValueError(f"{key}.model: {error}") from None
    gpu = next((gpu for name, gpu in GPUS.items() if name.casefold() == section.gpu.casefold()), None)
    if gpu is None:
        raise ValueError(f"{key}.gpu: {unknown('GPU', section.gpu, GPUS)}")
    refused = model.tp_refusal(section.tensor_parallel_size)
    if refused is not None:
        raise ValueError(f"{key}.tensor_parallel_size: {model.name}: {refused}")
    try:
        check_ranks(section, model, section.tensor_parallel_size)
        config = _config(section, model, gpu)
        if section.data_parallel_size > 1:
            return _ranks(section, config, model, gpu, beside, note)
        grid = _grid(section, config, model, gpu, beside, note)
        drafter = _drafter(section, config, model, gpu, beside, grid)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None
    overhead = section.overhead
    try:
        host = grid.host
        if not host.priced:
            host = _overhead(section)
        elif overhead != OverheadSection():
            raise ValueError(f"host is {section.host}, and overhead is given: leave one of them out")
        elif section.async_scheduling:
            host = replace(host, overlapped=True)
        cost = GridCost(grid, config, host, drafter)
    except ValueError as error:
        raise ValueError(f"{key}: {error}; lower what goes beyond") from None
    names = _names(section)
    role, tp = ROLES[section.role], section.tensor_parallel_size
    devices, kv_bytes = tp * section.pipeline_parallel_size, tp * model.kv_bytes_per_token(_KV_BYTES, tp)
    return [
        EngineSpec(name, config, cost, section.bucket, devices=devices, role=role, kv_bytes=kv_bytes) for name in names
    ]


def _ranks(
    section: EngineSection,
    config: EngineConfig,
    model: ModelSpec,
    gpu: GPU,
    beside: Path,
    note: Callable[[str], None],
) -> list[EngineSpec]:
    """The ranks of each group."""
    tp = section.tensor_parallel_size
    if section.pipeline_parallel_size > 1:
        raise ValueError("pipeline_parallel_size with data_parallel_size is not simulated: leave one of them out")
    if section.host != "none" and section.overhead != OverheadSection():
        raise ValueError(f"host is {section.host}, and overhead is given: leave one of them out")
    cost = group_cost(
        section,
        model,
        gpu,
        tp,
        config,
        source=section.profile,
        host=section.host,
        overhead=_overhead(section),
        weight_bytes=_weight_bytes(section),
        beside=beside,
        note=note,
    )
    alone, kv_bytes = cost.rank(Graph("NONE")), tp * model.kv_bytes_per_token(_KV_BYTES, tp)
    return [
        EngineSpec(
            f"{name}-dp{rank}",
            config,
            alone,
            section.bucket,
            devices=tp,
            role=ROLES[section.role],
            kv_bytes=kv_bytes,
            group=GroupSpec(name, cost, section.dp_sync_interval),
        )
        for name in _names(section)
        for rank in range(section.data_parallel_size)
    ]


def _names(section: EngineSection) -> list[str]:
    return [section.name] if section.count == 1 else [f"{section.name}-{number}" for number in range(section.count)]


def _overhead(section: EngineSection) -> HostCost:
    overhead = section.overhead
    return HostCost(overhead.iteration, overhead.request, overhead.overlapped, source="engines file")


def _check_models(file: EnginesFile) -> None:
    """Raises ValueError where an engine could not use the KV of another one."""
    apart = [(f"engines.{index}", it) for index, it in enumerate(file.engines) if it.role != "colocated"]
    for key, section in apart:
        first = apart[0][1].model
        if load_model(section.model) != load_model(first):
            raise ValueError(f"{key}.model is {section.model}, and {apart[0][0]}.model {first}: KV differs, name one")


def _config(section: EngineSection, model: ModelSpec, gpu: GPU) -> EngineConfig:
    longest = model.max_context if section.max_model_len is None else section.max_model_len
    if longest > model.max_context:
        raise ValueError(f"max_model_len is {longest}; {model.name} is made for {model.max_context} tokens: lower it")
    if section.pipeline_parallel_size > model.layers:
        raise ValueError(
            f"pipeline_parallel_size is {section.pipeline_parallel_size}; {model.name} has {model.layers} layers:"
            " lower it"
        )
    blocks = section.kv_blocks
    if blocks is None:
        blocks = _kv_blocks(section, model, gpu)
        if blocks * section.block_size < longest:
            raise ValueError(_no_room(section, model, gpu, blocks * section.block_size, longest))
    given = {field.name: getattr(section, field.name) for field in fields(EngineConfig)}
    given["speculative"] = _drafts(section)
    if section.enforce_eager:
        if section.capture_sizes:
            raise ValueError("enforce_eager is true, and capture_sizes are given: leave one of them out")
    elif section.host != "none" and not section.capture_sizes:
        each = 1 if section.speculative is None else 1 + section.speculative.num_speculative_tokens
        given["capture_sizes"] = capture_sizes(section.max_num_seqs, section.max_num_batched_tokens, tokens_each=each)
    return EngineConfig(**{**given, "max_model_len": longest, "kv_blocks": blocks})


def _kv_blocks(section: EngineSection, model: ModelSpec, gpu: GPU) -> int:
    tp, weights, more = section.tensor_parallel_size, 0.0, 0.0  # a drafter's, and its KV for each byte of the model's
    divided = section.data_parallel_size > 1  # experts are
    if divided:
        weights = expert_bytes(
            section, model, tp, weight_bytes=_weight_bytes(section), batched_tokens=section.max_num_batched_tokens
        )
    drafts = section.speculative
    if drafts is not None and drafts.model is not None:
        drafter = load_model(drafts.model)
        weights += drafter.weight_bytes(_KV_BYTES, tp)
        more = drafter.kv_bytes_per_token(_KV_BYTES, tp) / model.kv_bytes_per_token(_KV_BYTES, tp)
    elif drafts is not None and drafts.method != "ngram":
        weights += model.weight_bytes(_weight_bytes(section), tp) / model.layers
        more = 1 / model.layers
    tokens = kv_tokens(
        model,
        gpu.memory,
        section.gpu_memory_utilization,
        tp,
        weight_bytes=_weight_bytes(section),
        kv_bytes=_KV_BYTES * (1 + more),
        batched_tokens=section.max_num_batched_tokens,
        pp=section.pipeline_parallel_size,
        taken=weights,
        routed=not divided,
    )
    return max(0, tokens // section.block_size - 1)  # vLLM keeps one for itself


def _no_room(section: EngineSection, model: ModelSpec, gpu: GPU, tokens: int, longest: int) -> str:
    """Why there is KV memory for so few tokens: the key that would make room if it alone were no more than usual."""
    gpus = section.tensor_parallel_size * section.pipeline_parallel_size
    left = (
        f"{model.name} leaves KV memory for {tokens:,} tokens on {gpus} x {gpu.name}, less than one request of"
        f" max_model_len {longest:,}"
    )
    for key, usual in (("block_size", BLOCK), ("max_num_batched_tokens", _BATCHED_TOKENS)):
        given = getattr(section, key)
        modest = section.model_copy(update={key: min(given, usual)})
        if _kv_blocks(modest, model, gpu) * modest.block_size >= longest:
            return f"{key} is {given}: {left}: lower it"
    return (
        f"gpu_memory_utilization is {section.gpu_memory_utilization}: {left}: raise it or tensor_parallel_size, or"
        " lower max_model_len"
    )


def _grid(
    section: EngineSection,
    config: EngineConfig,
    model: ModelSpec,
    gpu: GPU,
    beside: Path,
    note: Callable[[str], None],
) -> EngineGrid:
    tp = section.tensor_parallel_size
    source = section.profile
    if source not in ("auto", "tables", "roofline"):
        source = str(beside / source)
    host = section.host if section.host in ("none", "default") else str(beside / section.host)
    node = NodeClass(section.name, 1, max(_NODE, tp), gpu, intra_bandwidth=gpu.link, inter_bandwidth=_NETWORK)
    recipe = Recipe(
        batch=1,
        samples_per_prompt=1,
        max_length=config.max_model_len,
        rollout_dtype=section.quantization,
    )
    try:
        (profile,) = engine_profiles(Cluster((node,)), model, recipe, source, note, host)
    except ConfigError as error:
        raise ValueError(f"profile: {str(error).removeprefix('--profile ')}") from None
    try:
        return profile.grid(tp)
    except ValueError:
        known = ", ".join(str(grid.tp) for grid in profile.engines)
        raise ValueError(
            f"tensor_parallel_size is {tp}; engine times ({profile.source}) are known for {known}: take one"
        ) from None


def _drafts(section: EngineSection) -> Speculative | None:
    if section.speculative is None:
        return None
    try:
        return section.speculative.drafts()
    except ValueError as error:
        raise ValueError(f"speculative.{error}") from None


def _drafter(
    section: EngineSection, config: EngineConfig, model: ModelSpec, gpu: GPU, beside: Path, grid: EngineGrid
) -> EngineGrid | None:
    """The times of what proposes drafts: a model of its own, or one layer of the engine's."""
    drafts = section.speculative
    if drafts is None or drafts.method == "ngram":
        return None
    if drafts.model is None:
        return grid.slowed(1 / model.layers)
    try:
        small = load_model(drafts.model)
        if small.max_context < config.max_model_len:
            raise ValueError(f"{small.name} is made for {small.max_context} tokens, fewer than max_model_len")
        alone = section.model_copy(update={"host": "none", "quantization": None})
        return _grid(alone, config, small, gpu, beside, lambda _: None)
    except ValueError as error:
        raise ValueError(f"speculative.model: {error}") from None


def _weight_bytes(section: EngineSection) -> int:
    return 1 if section.quantization == "fp8" else 2
