"""Engines as a YAML file describes them.

Invariant: a file gives a deployment that can be simulated, or is refused in one line that names the key and what would
be right. Lengths are tokens, times are seconds. What vLLM has a name for has that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError, read_section, refusal, unknown
from libra.cost.afd import afd_refusal
from libra.cost.engine_memory import BLOCK, ffn_rank_bytes, kv_tokens
from libra.cost.graphs import capture_sizes
from libra.cost.grid import EngineGrid
from libra.cost.host import NO_HOST, HostCost
from libra.cost.kernels import NO_TERMS
from libra.cost.sources.profiles import engine_profiles, host_part, stage_profile
from libra.cost.sources.tables import NoTablesError
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.sim.deployment import DEFAULT_DECODE_ROUTE, Deployment, WeightUpdate
from libra.sim.engine.afd import AfdCost, AttentionFFN, attention_ranks
from libra.sim.engine.config import ROLES, EngineConfig, EngineSpec
from libra.sim.engine.expert_cost import ExpertCost
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, GroupSpec
from libra.sim.engine.iteration_cost import IterationCost
from libra.sim.engine.kv_tier import KVTier
from libra.sim.engine.speculative import Speculative
from libra.sim.engines_keys import BATCHED_TOKENS, AfdSection, EngineSection, EnginesFile, OverheadSection
from libra.sim.expert_ranks import check_ranks, expert_bytes, group_cost
from libra.sim.kv_network import KVNetwork

_KV_BYTES = 2  # of an element
_NODE = 8  # GPUs: the node that an engine is taken to stand in, unless it is larger
_NETWORK = 50e9  # bytes/s between nodes: an engine stays within one


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
    gpu = _gpu(section.gpu, f"{key}.gpu")
    refused = model.tp_refusal(section.tensor_parallel_size)
    if refused is not None:
        raise ValueError(f"{key}.tensor_parallel_size: {model.name}: {refused}")
    numbers = range(section.count)
    names = [section.name] if section.count == 1 else [f"{section.name}-{number}" for number in numbers]
    role, tp = ROLES[section.role], section.tensor_parallel_size
    devices, kv_bytes = tp * section.pipeline_parallel_size, tp * model.kv_bytes_per_token(_KV_BYTES, tp)

    def spec(name: str, config: EngineConfig, cost: IterationCost) -> EngineSpec:
        return EngineSpec(name, config, cost, section.bucket, devices=devices, role=role, kv_bytes=kv_bytes)

    try:
        check_ranks(section, model, tp)
        if section.afd is not None:
            _check_afd(section, section.afd, model, gpu)
        config = replace(_config(section, model, gpu), kv_tiers=_tiers(section, model))
        if section.data_parallel_size > 1:
            cost = _of_ranks(section, config, model, gpu, beside, note)
            alone = spec(section.name, config, cost.rank(Graph("NONE")))
            groups = [GroupSpec(name, cost, section.dp_sync_interval) for name in names]
            ranks = range(section.data_parallel_size)
            return [replace(alone, name=f"{it.name}-dp{rank}", group=it) for it in groups for rank in ranks]
        if section.afd is not None:
            apart = _apart(section, section.afd, config, model, gpu, beside, note)
            first = spec(section.name, config, apart.own)
            return [it for name in names for it in attention_ranks(replace(first, name=name), apart)]
        grid = _grid(section, config, model, gpu, beside, note)
        drafter = _drafter(section, config, model, gpu, beside, grid)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None
    try:
        own = GridCost(grid, config, _host(section, grid.host), drafter)
    except ValueError as error:
        raise ValueError(f"{key}: {error}; lower what goes beyond") from None
    return [spec(name, config, own) for name in names]


def _gpu(given: str, key: str) -> GPU:
    gpu = next((gpu for name, gpu in GPUS.items() if name.casefold() == given.casefold()), None)
    if gpu is None:
        raise ValueError(f"{key}: {unknown('GPU', given, GPUS)}")
    return gpu


def _host(section: EngineSection, host: HostCost) -> HostCost:
    """What the CPU adds, where the profile's host is this one."""
    overhead = section.overhead
    if not host.priced:
        return HostCost(overhead.iteration, overhead.request, overhead.overlapped, source="engines file")
    if overhead != OverheadSection():
        raise ValueError(f"host is {section.host}, and overhead is given: leave one of them out")
    return replace(host, overlapped=True) if section.async_scheduling else host


def _check_afd(section: EngineSection, afd: AfdSection, model: ModelSpec, gpu: GPU) -> None:
    others = (("pipeline_parallel_size", 1), ("async_scheduling", False), ("speculative", None), ("kv_tiers", ()))
    for option, off in (*others, ("data_parallel_size", 1)):
        if getattr(section, option) != off:
            raise ValueError(f"afd with {option} is not simulated: leave one of them out")
    refused = afd_refusal(model, afd.attention, afd.ffn, afd.micro_batches)
    if refused is not None:
        raise ValueError(refused)
    ffn_gpu = gpu if afd.ffn_gpu is None else _gpu(afd.ffn_gpu, "afd.ffn_gpu")
    tokens = -(-afd.attention * section.max_num_batched_tokens // afd.micro_batches)
    held = ffn_rank_bytes(model, afd.ffn, weight_bytes=_weight_bytes(section), tokens=tokens)
    memory = section.gpu_memory_utilization * ffn_gpu.memory
    if held > memory:
        raise ValueError(
            f"afd.ffn is {afd.ffn}: an FFN rank needs {held / 1e9:.0f} GB for its experts and what comes to them, of"
            f" {memory / 1e9:.0f} GB: raise it, or lower max_num_batched_tokens"
        )


def _apart(
    section: EngineSection,
    afd: AfdSection,
    config: EngineConfig,
    model: ModelSpec,
    gpu: GPU,
    beside: Path,
    note: Callable[[str], None],
) -> AfdCost:
    """What attention ranks and FFN ranks take together."""
    tp = section.tensor_parallel_size
    ffn_gpu = None if afd.ffn_gpu is None else _gpu(afd.ffn_gpu, "afd.ffn_gpu")
    ranks = AttentionFFN(
        afd.attention, afd.ffn, afd.bandwidth, afd.latency, afd.micro_batches, serial_links=afd.serial_links
    )
    try:
        stages, host = stage_profile(*_asked(section, config, model, gpu, beside), tp, afd.ffn, note, ffn_gpu)
        return AfdCost(stages, config, ranks, _host(section, host), tp)
    except ConfigError as error:
        raise ValueError(f"profile: {str(error).removeprefix('--profile ')}") from None


def _of_ranks(
    section: EngineSection,
    config: EngineConfig,
    model: ModelSpec,
    gpu: GPU,
    beside: Path,
    note: Callable[[str], None],
) -> ExpertCost:
    """What data-parallel ranks take together."""
    if section.pipeline_parallel_size > 1:
        raise ValueError("pipeline_parallel_size with data_parallel_size is not simulated: leave one of them out")
    *_, source, host = _asked(section, config, model, gpu, beside)
    try:
        added = host_part(host, model, note)
        return group_cost(
            section,
            model,
            gpu,
            section.tensor_parallel_size,
            config,
            source=source,
            host=_host(section, NO_HOST if added is None else added[0]),
            terms=NO_TERMS if added is None else added[1],
            weight_bytes=_weight_bytes(section),
            beside=beside,
            note=note,
        )
    except (ConfigError, NoTablesError) as error:
        raise ValueError(f"profile: {error}") from None


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
    given["speculative"], given["kv_tiers"] = _drafts(section), ()
    if section.enforce_eager:
        if section.capture_sizes:
            raise ValueError("enforce_eager is true, and capture_sizes are given: leave one of them out")
    elif section.host != "none" and not section.capture_sizes:
        each = 1 if section.speculative is None else 1 + section.speculative.num_speculative_tokens
        given["capture_sizes"] = capture_sizes(section.max_num_seqs, section.max_num_batched_tokens, tokens_each=each)
    return EngineConfig(**{**given, "max_model_len": longest, "kv_blocks": blocks})


def _tiers(section: EngineSection, model: ModelSpec) -> tuple[KVTier, ...]:
    tp, tiers = section.tensor_parallel_size, []
    block_bytes = section.block_size * tp * model.kv_bytes_per_token(_KV_BYTES, tp)
    longest = model.max_context if section.max_model_len is None else section.max_model_len
    for place, given in enumerate(section.kv_tiers):
        chunks = int(given.gib * 2**30 // (block_bytes * given.blocks_per_chunk))
        tokens = chunks * given.blocks_per_chunk * section.block_size
        if tokens < longest:
            raise ValueError(
                f"kv_tiers.{place}.gib is {given.gib:g}: {given.name} holds {tokens:,} tokens, less than one request of"
                f" max_model_len {longest:,}: raise it, or lower max_model_len"
            )
        bandwidth = given.bandwidth * (1 if given.shared else tp * section.pipeline_parallel_size)
        tiers.append(
            KVTier(
                given.name,
                chunks,
                block_bytes,
                bandwidth,
                bandwidth,
                given.latency,
                given.blocks_per_chunk,
                given.policy,
                given.offload_prompt_only,
                given.shared,
            )
        )
    return tuple(tiers)


def _kv_blocks(section: EngineSection, model: ModelSpec, gpu: GPU) -> int:
    tp, weights, more = section.tensor_parallel_size, 0.0, 0.0  # a drafter's, and its KV for each byte of the model's
    divided, drafts = section.data_parallel_size > 1, section.speculative
    if drafts is not None and drafts.model is not None:
        drafter = load_model(drafts.model)
        weights = drafter.weight_bytes(_KV_BYTES, tp)
        more = drafter.kv_bytes_per_token(_KV_BYTES, tp) / model.kv_bytes_per_token(_KV_BYTES, tp)
    elif drafts is not None and drafts.method != "ngram":
        weights, more = model.weight_bytes(_weight_bytes(section), tp) / model.layers, 1 / model.layers
    if divided:
        batched, width = section.max_num_batched_tokens, _weight_bytes(section)
        weights += expert_bytes(section, model, tp, weight_bytes=width, batched_tokens=batched)
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
        routed=section.afd is None and not divided,
    )
    return max(0, tokens // section.block_size - 1)  # vLLM keeps one for itself


def _no_room(section: EngineSection, model: ModelSpec, gpu: GPU, tokens: int, longest: int) -> str:
    """Why there is KV memory for so few tokens: the key that would make room if it alone were no more than usual."""
    gpus = section.tensor_parallel_size * section.pipeline_parallel_size
    left = (
        f"{model.name} leaves KV memory for {tokens:,} tokens on {gpus} x {gpu.name}, less than one request of"
        f" max_model_len {longest:,}"
    )
    for key, usual in (("block_size", BLOCK), ("max_num_batched_tokens", BATCHED_TOKENS)):
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
    node, model, recipe, source, host = _asked(section, config, model, gpu, beside)
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


def _asked(
    section: EngineSection, config: EngineConfig, model: ModelSpec, gpu: GPU, beside: Path
) -> tuple[NodeClass, ModelSpec, Recipe, str, str]:
    """What profiles are asked for: nodes, model, recipe, the source, and the host."""
    tp, source = section.tensor_parallel_size, section.profile
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
    return node, model, recipe, source, host


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
