"""The configuration of an engine in a file. The file's keys are completed from the model and the memory of the GPUs.

Invariant: an impossible configuration is refused in a line that begins with the key.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import lcm

from libra.config.yaml_file import ConfigError
from libra.cost.engine_memory import BLOCK, drafter_memory, held_bytes, tokens_in
from libra.cost.graphs import capture_sizes
from libra.hardware.kv_layers import GroupedLayers
from libra.hardware.model_file import load_model
from libra.sim.described_engine import DescribedEngine
from libra.sim.described_groups import grouped_layers, told
from libra.sim.described_tiers import tiers_of
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.speculative import Speculative
from libra.sim.engines_keys import BATCHED_TOKENS
from libra.sim.expert_ranks import expert_bytes


def described_config(engine: DescribedEngine) -> EngineConfig:
    """The configuration of an engine. Raises ValueError that begins with the key."""
    section, model, longest = engine.section, engine.model, engine.longest
    if longest > model.max_context:
        raise ValueError(
            f"max_model_len is {longest}, but {model.name} is made for {model.max_context} tokens: lower it"
        )
    if section.pipeline_parallel_size > model.layers:
        raise ValueError(
            f"pipeline_parallel_size is {section.pipeline_parallel_size}, but {model.name} has {model.layers} layers:"
            " lower it"
        )
    blocks, grouped = section.kv_blocks, grouped_layers(engine)
    if blocks is None and section.kv_groups:
        raise ValueError("kv_groups without kv_blocks: give the blocks of the pool that the groups share")
    several = grouped is not None and not section.disable_hybrid_kv_cache_manager
    if blocks is None:
        blocks = _kv_blocks(engine, grouped)
        if not several and blocks * section.block_size < longest:
            raise ValueError(_no_room(engine, blocks * section.block_size))
    given = {field.name: getattr(section, field.name) for field in fields(EngineConfig)}
    given["speculative"], given["kv_tiers"] = _drafts(engine), ()
    given["kv_groups"] = tuple(it.group() for it in section.kv_groups)
    if grouped is not None and several:
        given["kv_groups"], given["block_size"] = grouped.groups, lcm(*(it.block_size for it in grouped.groups))
        engine.note(told(engine, grouped))
    if section.enforce_eager:
        if section.capture_sizes:
            raise ValueError("enforce_eager is true, but capture_sizes are given: leave one of them out")
    elif section.host != "none" and not section.capture_sizes:
        each = 1 if section.speculative is None else 1 + section.speculative.num_speculative_tokens
        given["capture_sizes"] = capture_sizes(engine.seqs, section.max_num_batched_tokens, tokens_each=each)
    config = EngineConfig(**{**given, "max_num_seqs": engine.seqs, "max_model_len": longest, "kv_blocks": blocks})
    tiers = tiers_of(
        [it.described() for it in section.kv_tiers],
        "kv_tiers",
        "one request of max_model_len",
        longest,
        section.block_size,
        engine.kv_bytes,
        engine.gpus,
    )
    return replace(config, kv_tiers=tiers)


def _drafts(engine: DescribedEngine) -> Speculative | None:
    given = engine.section.speculative
    if given is None:
        return None
    try:
        return given.drafts()
    except ValueError as error:
        raise ValueError(f"speculative.{error}") from None


def _kv_blocks(engine: DescribedEngine, grouped: GroupedLayers | None = None) -> int:
    section, model, tp, stored = engine.section, engine.model, engine.tp, engine.quantization
    weights, more = 0.0, 0.0  # bytes of a drafter's weights; its KV bytes for each byte of the model's KV
    divided, drafts = section.data_parallel_size > 1, section.speculative
    if drafts is not None and drafts.method != "ngram":
        try:
            drafter = None if drafts.model is None else load_model(drafts.model)
        except ConfigError as error:
            raise ValueError(f"speculative.model: {error}") from None
        weights, more = drafter_memory(model, tp, drafter, quantization=stored, dp=section.data_parallel_size)
    if divided:
        weights += expert_bytes(engine)
    pp, routed = section.pipeline_parallel_size, section.afd is None and not divided
    held = held_bytes(
        model,
        tp,
        batched_tokens=section.max_num_batched_tokens,
        quantization=stored,
        pp=pp,
        routed=routed,
        seqs=engine.seqs,
        graphs=not section.enforce_eager,
        switched=engine.gpu.switched,
        profiling=engine.profiling,
    )
    free = engine.gpu.usable * section.gpu_memory_utilization - weights - held
    if grouped is not None:
        return grouped.blocks(max(0.0, free) / (1 + more))
    tokens = tokens_in(free, stored.kv_bytes_per_token(model, tp, pp, engine.longest) * (1 + more))
    return max(0, tokens // section.block_size - 1)  # vLLM keeps one block for itself


def _no_room(engine: DescribedEngine, tokens: int) -> str:
    """Reason why the KV memory has room for only `tokens` tokens. It names the key whose usual value would suffice."""
    section = engine.section
    left = (
        f"{engine.model.name} leaves KV memory for {tokens:,} tokens on {engine.gpus} x {engine.gpu.name}, less than"
        f" one request of max_model_len {engine.longest:,}"
    )
    for key, usual in (("block_size", BLOCK), ("max_num_batched_tokens", BATCHED_TOKENS)):
        given = getattr(section, key)
        modest = replace(engine, section=section.model_copy(update={key: min(given, usual)}))
        if _kv_blocks(modest) * modest.section.block_size >= engine.longest:
            return f"{key} is {given}: {left}: lower it"
    eplb = section.eplb_config
    few = section.model_copy(update={"eplb_config": eplb.model_copy(update={"num_redundant_experts": 0})})
    if _kv_blocks(replace(engine, section=few)) * section.block_size >= engine.longest:
        return f"eplb_config.num_redundant_experts is {eplb.num_redundant_experts}: {left}: lower it"
    return (
        f"gpu_memory_utilization is {section.gpu_memory_utilization}: {left}: raise it or tensor_parallel_size, or"
        " lower max_model_len"
    )
