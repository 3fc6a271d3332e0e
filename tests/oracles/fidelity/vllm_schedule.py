"""vLLM's own V1 scheduler, with no model behind it.

Invariant: every decision is vLLM's. What is made up here are the tokens that a model would have returned.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from libra.hardware.kv_groups import KVGroup
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Chain, Request
from libra.sim.engine.speculative import Draws
from tests.oracles.fidelity.connectors import PullConnector, TierConnector

_NUMBER_DIGITS = 10  # vLLM breaks ties by comparing names as text
_LONGEST_CONTEXT = 2**30  # tokens; of the model that is never run
_EOS = 2**62  # no token of a context


@dataclass(frozen=True, slots=True)
class Step:
    """One call of `schedule()` and what came of it. Requests go by their numbers."""

    time: int  # ticks, at which it begins
    scheduled: tuple[tuple[int, int], ...]  # (request, tokens), in vLLM's order: running ones, then admitted ones
    preempted: tuple[int, ...]  # in the order in which it happened
    cached: tuple[tuple[int, int], ...]  # (request, tokens found in the prefix cache) of those admitted or resumed now
    finished: tuple[int, ...]  # in the order in which vLLM ends them
    free_blocks: int  # once everything above is scheduled, and before what finishes gives its blocks back


class VllmEngine:
    """vLLM's scheduler, and the tokens that a model would add to what it schedules."""

    def __init__(self, config: EngineConfig, *, kv_role: str | None = None) -> None:
        """`kv_role` adds a connector that pulls KV, or keeps it to be pulled. A tier has vLLM's own connector; with
        both, that of the role comes first."""
        self.scheduler = _make_scheduler(config, kv_role)
        hashed = self.scheduler.hash_block_size
        self._hasher = get_request_block_hasher(hashed, sha256) if config.enable_prefix_caching else None
        self._tokens = _Tokens(config.max_model_len)
        self._requests: dict[str, Request] = {}
        self._speculative = config.speculative
        self._draws = None if config.speculative is None else Draws(config.speculative)
        self._verifications: Counter[str] = Counter()  # of drafts, by request
        self._computed: list[str] = []  # requests of the step that was computed last
        self._preempted: list[int] = []
        self._under_way: deque[tuple[SchedulerOutput, Step, dict[str, bool]]] = deque()
        self._most_under_way = 2 if config.async_scheduling else 1
        self._listen_for_preemptions()

    @property
    def busy(self) -> bool:
        return bool(self._under_way) or self.unfinished

    @property
    def full(self) -> bool:
        """Whether the next step is scheduled only when the oldest under way has ended."""
        return len(self._under_way) == self._most_under_way

    @property
    def scheduled_tokens(self) -> int:
        """Tokens of the youngest step under way."""
        return sum(tokens for _, tokens in self._under_way[-1][1].scheduled)

    @property
    def unfinished(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    @property
    def has_work(self) -> bool:
        """Whether the scheduler has work, be it for its connector alone."""
        return self.unfinished if self.scheduler.connector is None else bool(self.scheduler.has_requests())

    @property
    def transfers(self) -> OffloadingConnectorMetadata:
        """Transfers that the youngest step under way asks of the tier's worker."""
        asked = self._under_way[-1][0].kv_connector_metadata
        return asked.metadata[-1] if isinstance(asked, MultiKVConnectorMetadata) else asked

    def of_tier(self, told: OffloadingWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The report of the tier's worker, in the form that the scheduler takes."""
        beside = isinstance(self.scheduler.connector, MultiConnector)
        return MultiKVConnectorWorkerMetadata(metadata=(None, told)) if beside else told

    def add(self, request: Request) -> None:
        name = name_of(request.number)
        self._requests[name] = request
        self.scheduler.add_request(
            VllmRequest(
                request_id=name,
                prompt_token_ids=[self._tokens.at(request, position) for position in range(request.prompt_tokens)],
                sampling_params=_sampling(request),
                pooling_params=None,
                arrival_time=request.arrival,
                priority=request.priority,
                block_hasher=self._hasher,
            )
        )
        if request.pull or request.keeps:
            params = {"do_remote_prefill": True} if request.pull else {"do_remote_decode": True}
            self.scheduler.requests[name].kv_transfer_params = params

    def cancel(self, number: int) -> None:
        """Nothing happens to a request that is no longer there."""
        self.scheduler.finish_requests(name_of(number), RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> None:
        """Schedule a step."""
        alone = not self._under_way and self.scheduler.connector is None
        step = self.scheduled(self.scheduler.schedule())
        if alone and not step.scheduled and not step.preempted:
            raise RuntimeError("vLLM scheduled nothing, with requests waiting: the driver is at fault")

    def scheduled(self, output: SchedulerOutput) -> Step:
        """Record a decision of the scheduler as a step under way."""
        scheduled = tuple((int(name), tokens) for name, tokens in output.num_scheduled_tokens.items())
        free_blocks = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        step = Step(0, scheduled, tuple(self._preempted), _cached(output), (), free_blocks)
        self._preempted.clear()
        samples = {name: not self.scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        self._under_way.append((output, step, samples))
        return step

    def started_pulls(self) -> list[int]:
        """Requests whose KV is to be pulled since the last schedule."""
        connector = self.scheduler.connector
        assert isinstance(connector, PullConnector)
        started, connector.started = connector.started, []
        return [int(name) for name in started]

    def pulled_blocks(self, number: int) -> int:
        """Blocks that a request holds and that are not in the prefix cache: those that its pull fills."""
        blocks = self.scheduler.kv_cache_manager.get_blocks(name_of(number)).blocks[0]
        return sum(block.block_hash is None for block in blocks)

    def hear(self, transfers: KVConnectorOutput) -> None:
        """Transfers that ended while no step was under way."""
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=transfers)
        self.scheduler.update_from_output(SchedulerOutput.make_empty(), output)

    def end_oldest(self, time: int, transfers: KVConnectorOutput | None = None) -> Step:
        """End the oldest step under way, which began at `time`; `transfers` are those that ended meanwhile."""
        output, step, _ = self._under_way[0]
        results = self.scheduler.update_from_output(output, self.compute_oldest(transfers))
        self.draft()
        return replace(step, time=time, finished=_ended(results))

    def compute_oldest(self, transfers: KVConnectorOutput | None = None) -> ModelRunnerOutput:
        """Take the oldest step from those under way, and return what a model would return for it."""
        output, step, samples = self._under_way.popleft()
        self._computed = names = list(output.num_scheduled_tokens)
        drafts, admitted = output.scheduled_spec_decode_tokens, {number for number, _ in step.cached}
        sampled = [
            self._sample(name, 0 if int(name) in admitted else len(drafts.get(name, ()))) if samples[name] else []
            for name in names
        ]
        places = {name: index for index, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled_token_ids=sampled, kv_connector_output=transfers)

    def _sample(self, name: str, drafts: int) -> list[int]:
        """The next token of a request, and before it the drafts that are accepted. None comes of one that was given up,
        or of a prompt before its last chunk."""
        context, request = self.scheduler.requests.get(name), self._requests[name]
        if context is None:
            return []
        count = 1
        if drafts:
            assert self._draws is not None
            (gain,) = self._draws.gains(request.number, self._verifications[name], 1)
            self._verifications[name] += 1
            count = min(int(gain), 1 + drafts)
        known = context.num_output_tokens
        return [
            _EOS
            if request.stop == "eos" and known + more + 1 == request.output_tokens
            else self._tokens.at(request, context.num_tokens + more)
            for more in range(count)
        ]

    def draft(self) -> None:
        """Propose drafts for those who were in the step that was computed last. (With asynchronous scheduling the
        scheduler takes them to be there.)"""
        if self._speculative is None or isinstance(self.scheduler, AsyncScheduler):
            return
        there = [name for name in self._computed if name in self.scheduler.requests]
        drafts = [[0] * self._speculative.num_speculative_tokens for _ in there]
        self.scheduler.update_draft_token_ids(DraftTokenIds(there, drafts))

    def _listen_for_preemptions(self) -> None:
        """The scheduler's output names preempted requests as a set, and their order is part of the schedule."""
        preempt = self.scheduler._preempt_request

        def listen(request: VllmRequest, *arguments: Any, **options: Any) -> None:
            self._preempted.append(int(request.request_id))
            preempt(request, *arguments, **options)

        self.scheduler._preempt_request = listen


class _Tokens:
    """Token ids by position: equal where one chain owns both positions, and nowhere else."""

    def __init__(self, max_model_len: int) -> None:
        self._stride = max_model_len
        self._owners: dict[Chain | int, int] = {}  # a request without a chain is its own owner

    def at(self, request: Request, position: int) -> int:
        owner: Chain | int = request.number
        if request.chain is not None:
            chain = request.chain
            while chain.parent is not None and position < chain.fork:
                chain = chain.parent
            owner = chain
        return self._owners.setdefault(owner, len(self._owners)) * self._stride + position


def _ended(results: Any) -> tuple[int, ...]:
    """Requests in the order of their ends, except those whose KV did not come: vLLM ends these in no order."""
    ended = [
        (int(result.request_id), result.finish_reason)
        for client in results.values()
        for result in client.outputs
        if result.finish_reason is not None
    ]
    finished = [number for number, reason in ended if reason != FinishReason.ERROR]
    return (*finished, *sorted(number for number, reason in ended if reason == FinishReason.ERROR))


def _sampling(request: Request) -> SamplingParams:
    if request.stop == "eos":
        return SamplingParams(max_tokens=request.output_tokens + _LONGEST_CONTEXT, stop_token_ids=[_EOS])
    return SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)


def name_of(number: int) -> str:
    return f"{number:0{_NUMBER_DIGITS}d}"


def _cached(output: Any) -> tuple[tuple[int, int], ...]:
    """Admitted requests in the order of their admission; of those, new ones are listed apart from resumed ones."""
    running = output.scheduled_cached_reqs
    found = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs} | {
        name: tokens
        for name, tokens in zip(running.req_ids, running.num_computed_tokens, strict=True)
        if name in running.resumed_req_ids
    }
    return tuple((int(name), found[name]) for name in output.num_scheduled_tokens if name in found)


def _make_scheduler(config: EngineConfig, kv_role: str | None) -> Scheduler:
    model, cached = copy(_model_config()), config.enable_prefix_caching
    model.max_model_len = config.max_model_len
    cache_config = CacheConfig(config.block_size, enable_prefix_caching=cached, prefix_caching_hash_algo="sha256")
    cache_config.num_gpu_blocks = blocks = config.kv_blocks + 1  # one is vLLM's null block
    vllm_config = VllmConfig(
        model_config=model,
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_model_len=config.max_model_len,
            is_encoder_decoder=False,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=config.policy,
            watermark=config.watermark,
            scheduler_reserve_full_isl=config.reserve_full_prompt,
            long_prefill_token_threshold=0,
            async_scheduling=False,
        ),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=_connector(config, kv_role),
        speculative_config=_drafts(config, model),
    )
    vllm_config.scheduler_config.async_scheduling = config.async_scheduling  # vLLM turns it off for a CPU
    if cached and any(group.kind == "state" for group in config.kv_groups):
        cache_config.mamba_cache_mode = "align"
    kv_cache_config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=_groups(config))
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    scheduler = (AsyncScheduler if config.async_scheduling else Scheduler)(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    _check_settings(config, scheduler)
    return scheduler


def _drafts(config: EngineConfig, model: ModelConfig) -> SpeculativeConfig | None:
    """vLLM's settings for drafts. The method is n-grams, since other methods need a draft model."""
    if (speculative := config.speculative) is None:
        return None
    made = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=speculative.num_speculative_tokens,
        prompt_lookup_max=2,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )
    made.method = speculative.method
    return made


def _connector(config: EngineConfig, kv_role: str | None) -> KVTransferConfig | None:
    """A connector that pulls or keeps KV, one of the tier, or both."""
    made, failure = [], {"kv_load_failure_policy": config.kv_load_failure_policy}
    if kv_role is not None:
        made.append(_made(PullConnector, kv_role))
    if config.kv_tiers:
        made.append(_made(TierConnector, "kv_both") | {"kv_connector_extra_config": _tier(config)})
    if len(made) < 2:
        return KVTransferConfig(**made[0], **failure) if made else None
    both = {"kv_connector_extra_config": {"connectors": made}}
    return KVTransferConfig(kv_connector=MultiConnector.__name__, kv_role="kv_both", **both, **failure)


def _made(connector: type[Any], kv_role: str) -> dict[str, Any]:
    kind = {"kv_connector": connector.__name__, "kv_connector_module_path": connector.__module__}
    return {**kind, "kv_role": kv_role}


def _tier(config: EngineConfig) -> dict[str, Any]:
    (tier,) = config.kv_tiers
    page = _attention(config.block_size).page_size_bytes * tier.blocks_per_chunk
    aligned = CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT
    return {
        "cpu_bytes_to_use": tier.chunks * -(-page // aligned) * aligned,
        "blocks_per_chunk": tier.blocks_per_chunk,
        "eviction_policy": tier.policy,
        "offload_prompt_only": tier.offload_prompt_only,
    }


def _groups(config: EngineConfig) -> list[KVCacheGroupSpec]:
    if config.kv_groups:
        specs = [_spec(group, config) for group in config.kv_groups]
        return [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    # As vLLM finds out from the layers of a model with MTP.
    mtp = config.speculative is not None and config.speculative.method == "mtp"
    return [KVCacheGroupSpec(["attention"], _attention(config.block_size), is_eagle_group=mtp)]


def _spec(group: KVGroup, config: EngineConfig) -> KVCacheSpec:
    size, shape = group.block_size, {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if group.kind == "window":
        return SlidingWindowSpec(block_size=size, sliding_window=group.tokens, **shape)
    if group.kind == "chunk":
        return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=group.tokens, **shape)
    if group.kind == "state":
        mode = "align" if config.enable_prefix_caching else "none"
        size = size if config.enable_prefix_caching else config.max_model_len
        return MambaSpec(block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    return _attention(size)


def _attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)


@cache
def _model_config() -> ModelConfig:
    """Configuration of a model that exists only as such: the scheduler needs no more."""
    init_none_hash(sha256)
    with TemporaryDirectory() as directory:
        eight = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8)
        one = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        shape = {**kind, **eight, **one, "max_position_embeddings": _LONGEST_CONTEXT}
        Path(directory, "config.json").write_text(json.dumps(shape))
        return ModelConfig(model=directory, skip_tokenizer_init=True, dtype="float32", enforce_eager=True)


def _check_settings(config: EngineConfig, scheduler: Scheduler) -> None:
    """vLLM changes settings that do not suit its platform; then the schedule would answer another question."""
    asked_and_set = {
        "kv_blocks": (config.kv_blocks, scheduler.kv_cache_manager.block_pool.get_num_free_blocks()),
        "block_size": (config.block_size, scheduler.block_size if config.enable_prefix_caching else config.block_size),
        "max_model_len": (config.max_model_len, scheduler.max_model_len),
        "max_num_seqs": (config.max_num_seqs, scheduler.max_num_active_reqs),
        "max_num_batched_tokens": (config.max_num_batched_tokens, scheduler.max_num_scheduled_tokens),
        "enable_chunked_prefill": (config.enable_chunked_prefill, scheduler.scheduler_config.enable_chunked_prefill),
        "policy": (config.policy, scheduler.policy.value),
        "enable_prefix_caching": (config.enable_prefix_caching, scheduler.kv_cache_manager.enable_caching),
        "watermark": (config.watermark_blocks, scheduler.kv_cache_manager.watermark_blocks),
        "reserve_full_prompt": (config.reserve_full_prompt, scheduler.scheduler_reserve_full_isl),
        "async_scheduling": (config.async_scheduling, scheduler.scheduler_config.async_scheduling),
        "lookahead": (config.lookahead, scheduler.num_lookahead_tokens),
    }
    changed = {field: pair for field, pair in asked_and_set.items() if pair[0] != pair[1]}
    if changed:
        raise RuntimeError(f"vLLM changed settings, as (asked, set): {changed}; install the version pinned here")
