"""The engines of a candidate, for the simulator.

Invariant: memory and times come from the cost model. The only other inputs are the candidate's settings and vLLM's
defaults. KV is assumed to be sent over the network between nodes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from libra.cost.afd import StageGrid
from libra.cost.collectives import AllToAll
from libra.cost.engine_memory import BLOCK, drafter_memory, expert_rank_bytes, ffn_rank_bytes, kv_tokens
from libra.cost.expert_grid import ExpertGrid
from libra.cost.experts import power_law
from libra.cost.graphs import capture_sizes
from libra.cost.grid import EngineGrid, EngineProfile
from libra.cost.host import HostCost
from libra.cost.quantization import AS_STORED
from libra.cost.sources.expert_grids import expert_grid
from libra.cost.sources.roofline import stage_roofline
from libra.cost.sources.tables import NoTablesError, stage_tables
from libra.cost.transfer import Fabric, fabric
from libra.hardware.cluster import GPU, NodeClass
from libra.hardware.model import ModelSpec
from libra.serving.candidate import Apart, EnginePool, EngineSetup, ServingCandidate
from libra.serving.question import SizingQuestion
from libra.sim.described_tiers import tiers_of
from libra.sim.engine.afd import AfdCost, AttentionFFN, attention_ranks
from libra.sim.engine.config import ROLES, EngineConfig, EngineSpec
from libra.sim.engine.expert_cost import ExpertCost, ExpertLoad
from libra.sim.engine.grid_cost import GridCost
from libra.sim.engine.group_cost import Graph, GroupSpec
from libra.sim.engine.kv_tier import KVTier
from libra.sim.kv_network import KVNetwork

UTILIZATION = 0.9  # vLLM's default `gpu_memory_utilization`


class NoRoomError(ValueError):
    """An engine cannot run with these settings."""


def configuration(question: SizingQuestion, shape: EngineSetup) -> EngineConfig:
    """The configuration of an engine. Raises `NoRoomError` if the engine cannot run."""
    model, nodes = question.model, question.cluster.node_class(shape.nodes)
    if shape.pipeline_parallel_size > model.layers:
        raise NoRoomError(f"{model.name} has {model.layers} layers, too few for {shape.pipeline_parallel_size} stages")
    refused = AS_STORED.tp_refusal(
        model, shape.tensor_parallel_size, routed=shape.apart is None and shape.parallel is None
    )
    if refused is not None:
        raise NoRoomError(refused)
    if shape.max_num_batched_tokens < shape.max_num_seqs:
        raise NoRoomError(f"max_num_batched_tokens {shape.max_num_batched_tokens} is below max_num_seqs")
    taken, beside = 0.0, 0.0
    speculative = None if shape.drafts is None else shape.drafts.speculative
    each = 1 if speculative is None else speculative.tokens_each
    if shape.drafts is not None and shape.drafts.speculative.method != "ngram":
        drafter = None if shape.drafts.model is None else question.drafters[shape.drafts.model].model
        divided = 1 if shape.parallel is None else shape.parallel.size
        taken, beside = drafter_memory(model, shape.tensor_parallel_size, drafter, dp=divided)
    if shape.parallel is not None:
        batched = shape.ranks * shape.max_num_batched_tokens
        way, internode = shape.parallel.all2all_backend, shape.devices > nodes.gpus
        taken += expert_rank_bytes(model, shape.devices, tokens=batched, way=way, internode=internode)
    tokens = kv_tokens(
        model,
        nodes.gpu.usable,
        UTILIZATION,
        shape.tensor_parallel_size,
        batched_tokens=shape.max_num_batched_tokens,
        pp=shape.pipeline_parallel_size,
        taken=taken,
        kv_beside=beside,
        routed=shape.apart is None and shape.parallel is None,
        seqs=shape.max_num_seqs,
        context=question.longest,
        switched=nodes.gpu.switched,
    )
    if shape.apart is not None:
        _require_ffn_memory(question, shape, shape.apart)
    blocks = max(0, tokens // BLOCK - 1)  # vLLM keeps one block for itself
    if blocks * BLOCK < question.longest:
        raise NoRoomError(
            f"memory leaves KV for {blocks * BLOCK:,} tokens, less than the longest request ({question.longest:,})"
        )
    seqs, most = shape.max_num_seqs, shape.max_num_batched_tokens
    sizes = capture_sizes(seqs, most, tokens_each=each) if grid_of(question, shape).host.priced else ()
    config = EngineConfig(
        max_model_len=question.longest,
        kv_blocks=blocks,
        block_size=BLOCK,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        capture_sizes=sizes,
        pipeline_parallel_size=shape.pipeline_parallel_size,
        async_scheduling=shape.async_scheduling,
        speculative=speculative,
        kv_tiers=tiers_for(question, shape, "kv_tiers"),
    )
    if blocks < config.blocks(question.longest) + config.draft_blocks:
        raise NoRoomError(
            f"memory leaves KV for {blocks * BLOCK:,} tokens, less than the longest request ({question.longest:,}) and"
            " its drafts"
        )
    return config


def tiers_for(question: SizingQuestion, shape: EngineSetup, key: str) -> tuple[KVTier, ...]:
    """The KV tiers of an engine. Raises ValueError, which begins with `key`, if the longest request does not fit a
    tier."""
    return tiers_of(
        shape.kv_tiers,
        key,
        "the longest request of",
        question.longest,
        BLOCK,
        _kv_bytes(question, shape),
        shape.rank_devices,
    )


def _kv_bytes(question: SizingQuestion, shape: EngineSetup) -> float:
    """KV bytes of a token, on all devices together."""
    tp = shape.tensor_parallel_size
    return tp * AS_STORED.kv_bytes_per_token(question.model, tp, context=question.longest)


def grid_of(question: SizingQuestion, shape: EngineSetup) -> EngineGrid:
    """The times of an engine and of its host. With asynchronous scheduling, the host overlaps with the GPU. Raises
    ValueError if the profile lacks the tensor-parallel degree."""
    nodes = question.cluster.node_class(shape.nodes)
    grid = question.profiles[question.cluster.nodes.index(nodes)].grid(shape.tensor_parallel_size)
    if shape.async_scheduling and grid.host.priced:
        return replace(grid, host=replace(grid.host, overlapped=True))
    return grid


def drafter_of(question: SizingQuestion, shape: EngineSetup, grid: EngineGrid) -> EngineGrid | None:
    """The times of the drafter of an engine with times `grid`; None without a drafter. The drafter is a separate model,
    or a layer like the engine's layers. Raises `NoRoomError` if the drafter cannot be divided like the engine."""
    if shape.drafts is None or shape.drafts.speculative.method == "ngram":
        return None
    if shape.drafts.model is None:
        return grid.slowed(1 / question.model.layers)
    drafter = question.drafters[shape.drafts.model]
    nodes = question.cluster.node_class(shape.nodes)
    try:
        return drafter.profiles[question.cluster.nodes.index(nodes)].grid(shape.tensor_parallel_size)
    except ValueError as error:
        raise NoRoomError(str(error)) from None


def experts_of(question: SizingQuestion, shape: EngineSetup) -> ExpertGrid:
    """Times of ranks that divide experts, from the profile's source. Raises `NoRoomError` if the source has none."""
    nodes = question.cluster.node_class(shape.nodes)
    profile = question.profiles[question.cluster.nodes.index(nodes)]
    if profile.source.startswith("calibration"):
        raise NoRoomError("a calibration has no times for divided experts: give another profile")
    assert shape.parallel is not None
    ranks = shape.tensor_parallel_size, shape.ranks, shape.parallel.all2all_backend
    source = "auto" if "tables" in profile.source else "roofline"
    grid = _expert_grid(nodes.gpu, question.model, *ranks, fabric(nodes), source)
    return replace(grid, own=replace(grid.own, terms=profile.terms))


def _require_ffn_memory(question: SizingQuestion, shape: EngineSetup, apart: Apart) -> None:
    tokens = -(-apart.attention * shape.max_num_batched_tokens // apart.micro_batches)
    held = ffn_rank_bytes(question.model, apart.ffn, tokens=tokens)
    memory = UTILIZATION * question.cluster.node_class(shape.nodes).gpu.usable
    if held > memory:
        raise NoRoomError(
            f"an FFN rank has memory for {memory / 1e9:.0f} GB, but its experts and their activations need"
            f" {held / 1e9:.0f} GB"
        )


def group_cost(question: SizingQuestion, shape: EngineSetup) -> AfdCost:
    """Cost of an engine with attention and FFN on separate GPUs, with times from the source of the profile. Raises
    `NoRoomError` if the source has no such times."""
    return _group_cost(
        question.cluster.node_class(shape.nodes),
        question.model,
        shape,
        configuration(question, shape),
        question.profiles[question.cluster.nodes.index(question.cluster.node_class(shape.nodes))],
        grid_of(question, shape).host,
    )


@lru_cache(maxsize=128)
def _group_cost(
    nodes: NodeClass,
    model: ModelSpec,
    shape: EngineSetup,
    config: EngineConfig,
    profile: EngineProfile,
    host: HostCost,
) -> AfdCost:
    apart, source = shape.apart, profile.source.partition(":")[0]
    assert apart is not None
    if source not in ("tables", "roofline"):
        raise NoRoomError(f"a {source} has no times for attention and FFN on separate GPUs: give --profile roofline")
    stages = _stages(nodes.gpu, model, shape.tensor_parallel_size, apart.ffn, source)
    stages = replace(stages, attention=replace(stages.attention, terms=profile.terms))
    net = fabric(nodes)
    ranks = AttentionFFN(apart.attention, apart.ffn, net.network / net.gpus, net.network_latency, apart.micro_batches)
    return AfdCost(stages, config, ranks, host, shape.tensor_parallel_size)


@lru_cache(maxsize=128)
def _stages(gpu: GPU, model: ModelSpec, tp: int, ffn: int, source: str) -> StageGrid:
    if source == "roofline":
        return stage_roofline(gpu, model, tp, ffn)
    try:
        return stage_tables(gpu, model, tp, ffn)
    except NoTablesError as error:
        raise NoRoomError(error.asked) from None


def engines(question: SizingQuestion, candidate: ServingCandidate) -> tuple[EngineSpec, ...]:
    """The engines of a candidate. Raises `NoRoomError` if an engine cannot run."""
    made = []
    for place, pool in enumerate(candidate.pools):
        shape = pool.shape
        config = configuration(question, shape)
        group = None if shape.apart is None else group_cost(question, shape)
        grid = grid_of(question, shape)
        if shape.parallel is not None:
            made += _ranks(question, pool, f"{pool.role}-{place}", config)
            continue
        for number in range(pool.count):
            engine = EngineSpec(
                f"{pool.role}-{place}.{number}",
                config,
                _cost(grid, config, drafter_of(question, shape, grid)) if group is None else group.own,
                devices=shape.rank_devices,
                role=ROLES[pool.role],
                kv_bytes=_kv_bytes(question, shape),
            )
            made += [engine] if group is None else attention_ranks(engine, group)
    return tuple(made)


def _ranks(question: SizingQuestion, pool: EnginePool, name: str, config: EngineConfig) -> list[EngineSpec]:
    """The ranks of a pool's groups, which divide the experts."""
    shape, grid = pool.shape, experts_of(question, pool.shape)
    drafter, alike = drafter_of(question, shape, grid.own), shape.drafts is not None and shape.drafts.model is None
    cost = _expert_cost(grid, config, grid_of(question, shape).host, question.model, drafter, alike)
    alone = EngineSpec(
        name,
        config,
        cost.rank(Graph("NONE")),
        devices=shape.rank_devices,
        role=ROLES[pool.role],
        kv_bytes=_kv_bytes(question, shape),
    )
    groups = [GroupSpec(f"{name}.{number}", cost) for number in range(pool.count)]
    return [replace(alone, name=f"{it.name}-dp{rank}", group=it) for it in groups for rank in range(shape.ranks)]


def network(question: SizingQuestion, candidate: ServingCandidate) -> KVNetwork | None:
    """The network for KV between pools; None for colocated engines. Each GPU has an equal share of its node's network,
    and the slower side determines the speed."""
    if candidate.architecture == "colocated":
        return None
    apart = [pool for pool in candidate.pools if pool.role != "colocated"]
    fabrics = [fabric(question.cluster.node_class(pool.shape.nodes)) for pool in apart]
    return KVNetwork(
        bandwidth=min(it.network / it.gpus for it in fabrics), latency=max(it.network_latency for it in fabrics)
    )


@lru_cache(maxsize=128)
def _cost(grid: EngineGrid, config: EngineConfig, drafter: EngineGrid | None) -> GridCost:
    """The cost of an engine. Cached, since many candidates differ only in the number of engines."""
    return GridCost(grid, config, drafter=drafter)


@lru_cache(maxsize=128)
def _expert_grid(
    gpu: GPU, model: ModelSpec, tp: int, dp: int, way: AllToAll, fabric: Fabric, source: str
) -> ExpertGrid:
    return expert_grid(gpu, model, tp, dp, way, fabric, source=source)


@lru_cache(maxsize=128)
def _expert_cost(
    grid: ExpertGrid, config: EngineConfig, host: HostCost, model: ModelSpec, drafter: EngineGrid | None, alike: bool
) -> ExpertCost:
    """Cost with uniform load on the experts. `alike`: the drafter is a layer like the model's, with its own experts."""
    experts = model.experts
    assert experts is not None
    shares = power_law(experts.count, experts.active, 0.0, grid.layers, 0)
    load = ExpertLoad(lambda _: shares, experts.active)
    return ExpertCost(grid, config, load, None, host, drafter, draft_experts=alike and drafter is not None)
