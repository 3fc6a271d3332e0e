"""The keys of a YAML file that describes engines, with their types and defaults.

Invariant: keys have vLLM's names where vLLM has the option. Lengths are tokens, times are seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from libra.config.recipe import KVCacheDtype, WeightQuantization
from libra.config.yaml_file import Section
from libra.cost.collectives import AllToAll
from libra.hardware.kv_groups import KVGroup, KVGroupKind
from libra.sim.clock import LONGEST
from libra.sim.deployment import DEFAULT_DECODE_ROUTE, DEFAULT_ROUTE
from libra.sim.described_tiers import DescribedTier
from libra.sim.engine.chunk_cache import CachePolicy
from libra.sim.engine.config import FailurePolicy, RoleName, SchedulingPolicy
from libra.sim.engine.speculative import Speculative
from libra.sim.kv_network import DEFAULT_LEASE

_Count = Annotated[int, Field(strict=True, ge=1)]
_Index = Annotated[int, Field(strict=True, ge=0)]
_Seconds = Annotated[float, Field(ge=0, le=3600)]
_Duration = Annotated[float, Field(gt=0)]
_Flag = Annotated[bool, Field(strict=True)]

BATCHED_TOKENS = 8192  # default of `max_num_batched_tokens`


class OverheadSection(Section):
    """Host overhead of an iteration, in addition to kernel times."""

    iteration: _Seconds = 0.0
    request: _Seconds = 0.0  # for each request in the iteration
    overlapped: _Flag = False  # runs during the GPU's work, as with asynchronous scheduling: only the longer counts


class SpeculativeSection(Section):
    """Drafts, as in vLLM's `speculative_config`. Exactly one of rates, length and `accepted` determines how many drafts
    are accepted."""

    method: str
    num_speculative_tokens: Annotated[int, Field(strict=True, le=4096)]
    model: str | None = None  # draft model of the method draft_model, named like an engine's model
    synthetic_acceptance_rates: tuple[float, ...] = ()
    synthetic_acceptance_length: float | None = None
    accepted: tuple[int, ...] = ()
    seed: _Index = 0

    def drafts(self) -> Speculative:
        """The drafts of an engine. Raises ValueError that begins with the key."""
        count, length, rates = (
            self.num_speculative_tokens,
            self.synthetic_acceptance_length,
            self.synthetic_acceptance_rates,
        )
        if length is not None and (rates or self.accepted):
            raise ValueError("give only one of accepted, synthetic_acceptance_rates and synthetic_acceptance_length")
        if length is not None:
            drafts = Speculative.of_length(self.method, count, length, self.seed)
        else:
            drafts = Speculative(self.method, count, rates, self.accepted, self.seed)
        if (self.model is None) == (self.method == "draft_model"):
            raise ValueError(
                f"model is {self.model} with method {self.method}: give a model with draft_model, and only there"
            )
        return drafts


class AfdSection(Section):
    """Attention and FFN on different ranks. The engine is a group of attention ranks, and of FFN ranks with experts."""

    attention: _Count  # ranks of tensor_parallel_size GPUs
    ffn: _Count  # ranks of one GPU
    bandwidth: Annotated[float, Field(ge=1e6)]  # bytes/s of each GPU's network
    latency: _Seconds = 0.0
    micro_batches: _Count = 2  # as in afd-plugin for vLLM
    dbo_decode_token_threshold: _Count | None = None  # None: a batch is always divided
    dbo_prefill_token_threshold: _Count | None = None
    serial_links: _Flag = True  # a link carries one micro-batch at a time
    ffn_gpu: str | None = None  # a known name, if FFN ranks have another GPU


class KVTierSection(Section):
    """Memory to which KV is offloaded from the GPUs: an engine's own, or one that engines share."""

    name: Annotated[str, Field(min_length=1)]
    gib: Annotated[float, Field(gt=0, le=1e9)]
    bandwidth: Annotated[float, Field(gt=0)]  # bytes/s each way, of each GPU; of the node's link where it is shared
    latency: _Seconds = 0.0
    policy: CachePolicy = "lru"
    blocks_per_chunk: _Count = 1
    offload_prompt_only: _Flag = True
    shared: _Flag = False

    def described(self) -> DescribedTier:
        return DescribedTier(**self.model_dump())


class KVGroupSection(Section):
    """Layers that share a block table."""

    kind: KVGroupKind
    block_size: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 16
    tokens: _Index = 0  # of the window or of a chunk

    def group(self) -> KVGroup:
        """The group. Raises ValueError that begins with `kv_groups`."""
        return KVGroup(self.kind, self.block_size, self.tokens)


class EplbSection(Section):
    """vLLM's `eplb_config`."""

    num_redundant_experts: _Index = 0
    window_size: _Count = 1000
    step_interval: _Count = 3000


class ExpertLoadSection(Section):
    """Distribution of tokens over experts."""

    power_law: Annotated[float, Field(ge=0, lt=100)] = 0.0  # exponent; 0: equal loads
    frequencies: str | None = (
        None  # instead of power_law: a JSON file, relative to this file, with a row of counts per layer, or one for all
    )
    drift_interval: _Count | None = None  # iterations after which a power law is drawn again
    skew: Literal["expected", "drawn"] = "expected"
    seed: _Index = 0


class NodeSection(Section):
    """The nodes that an engine runs on, as in a cluster file."""

    gpus: _Count
    inter_bandwidth: Any
    intra_bandwidth: Any = None  # None: the GPU's link


class RanksSection(Section):
    """Keys of an engine's data-parallel ranks."""

    data_parallel_size: _Count = 1
    enable_expert_parallel: _Flag = False
    all2all_backend: AllToAll = "allgather_reducescatter"
    network_bandwidth: Annotated[float, Field(gt=0)] = (
        50e9  # bytes/s of each GPU between nodes, with expert parallelism
    )
    dp_sync_interval: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 16
    enable_eplb: _Flag = False
    eplb_config: EplbSection = EplbSection()
    expert_load: ExpertLoadSection = ExpertLoadSection()


class EngineSection(RanksSection):
    """`count` equal engines, or `count` equal groups of ranks."""

    name: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    count: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1
    model: str  # config.json, its directory, or a known name
    gpu: Any  # a known name, or a mapping as in a cluster file
    node: NodeSection | None = None  # None: eight GPUs, or more if tensor parallelism needs them
    profile: str = "auto"  # source of times: auto, tables, roofline, or a calibration file, relative to this file
    tensor_parallel_size: _Count = 1
    pipeline_parallel_size: _Count = 1
    quantization: WeightQuantization | None = None  # of the weights
    kv_cache_dtype: KVCacheDtype = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    vllm_version: str | None = None  # whose profiling run determines KV memory; None: the latest version
    kv_blocks: _Count | None = None  # None: as many as `gpu_memory_utilization` leaves room for
    max_model_len: _Count | None = None  # None: the model's longest context
    block_size: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 16
    max_num_seqs: _Count | None = None  # None: vLLM's default for the GPU, see `DescribedEngine.seqs`
    max_num_batched_tokens: _Count = BATCHED_TOKENS
    enable_chunked_prefill: _Flag = True
    policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: _Flag = True
    watermark: float = 0.0
    reserve_full_prompt: _Flag = True
    capture_sizes: tuple[_Count, ...] = ()
    async_scheduling: _Flag = False
    speculative: SpeculativeSection | None = None
    afd: AfdSection | None = None
    kv_tiers: tuple[KVTierSection, ...] = ()  # the nearest first
    kv_groups: tuple[KVGroupSection, ...] = ()  # empty: the groups that vLLM forms from the model's layers
    disable_hybrid_kv_cache_manager: _Flag = False  # every layer keeps the whole context
    role: RoleName = "colocated"
    kv_load_failure_policy: FailurePolicy = "fail"
    num_reserved_decode_tokens: _Index | None = None  # None: 512 if KV is pushed, otherwise 0
    enforce_eager: _Flag = False  # no CUDA graphs
    host: str = "none"  # host overhead: none, default, or a file of fitted times, relative to this file
    overhead: OverheadSection = OverheadSection()
    bucket: _Index = 0


class UpdatesSection(Section):
    """Repeated weight updates of all engines at once."""

    every: _Duration
    times: Annotated[int, Field(strict=True, ge=1, le=100_000)]
    pause: _Seconds
    refresh: _Flag = False  # contexts are computed again


class KVTransferSection(Section):
    """KV transfer from engines with role prefill to engines with role decode."""

    bandwidth: Annotated[float, Field(ge=1e6)]  # bytes/s of each GPU's network
    latency: _Seconds = 0.0
    push: _Flag = False  # prefill engines push KV, as in SGLang; otherwise decode engines pull KV, as in vLLM
    lease: Annotated[float, Field(gt=0, le=86_400)] = DEFAULT_LEASE
    local_below: _Index = 0
    route: str = DEFAULT_DECODE_ROUTE


class EnginesFile(Section):
    engines: tuple[EngineSection, ...] = Field(min_length=1)
    route: str = DEFAULT_ROUTE
    sticky: _Flag = True
    limits: Annotated[tuple[_Count, ...], Field(min_length=1)] | None = None
    turn_tokens: _Count = 1
    kv_transfer: KVTransferSection | None = None
    weight_updates: UpdatesSection | None = None
    time_limit: Annotated[float, Field(gt=0, lt=LONGEST)] | None = None
