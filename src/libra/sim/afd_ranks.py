"""Engines with attention and FFN on different ranks, from an engines file.

Invariant: the error for an engine that cannot run is one line that begins with the key.
"""

from __future__ import annotations

from libra.config.yaml_file import ConfigError
from libra.cost.afd import afd_refusal
from libra.cost.engine_memory import ffn_rank_bytes
from libra.cost.sources.profiles import stage_profile
from libra.hardware.cluster import GPU
from libra.hardware.cluster_file import gpu_of
from libra.sim.described_engine import DescribedEngine
from libra.sim.described_times import host_cost, of_profile
from libra.sim.engine.afd import AfdCost, AttentionFFN
from libra.sim.engine.config import EngineConfig
from libra.sim.engines_keys import AfdSection


def check_afd(engine: DescribedEngine, afd: AfdSection) -> None:
    """Raises ValueError unless the model can be divided over the ranks of `afd`, and FFN ranks have enough memory."""
    section, model = engine.section, engine.model
    for option, off in (
        ("pipeline_parallel_size", 1),
        ("speculative", None),
        ("kv_tiers", ()),
        ("data_parallel_size", 1),
    ):
        if getattr(section, option) != off:
            raise ValueError(f"afd with {option} is not simulated: leave one of them out")
    if afd.micro_batches > section.max_num_batched_tokens:
        raise ValueError(
            f"afd.micro_batches is {afd.micro_batches}, more than max_num_batched_tokens,"
            f" {section.max_num_batched_tokens}: lower it"
        )
    refused = afd_refusal(model, afd.attention, afd.ffn, afd.micro_batches)
    if refused is not None:
        raise ValueError(refused)
    parts = afd.micro_batches if _ranks(afd).micro_batching is None else 1  # an undivided batch arrives at once
    tokens = -(-afd.attention * section.max_num_batched_tokens // parts)
    gpu = _ffn_gpu(afd) or engine.gpu
    held = ffn_rank_bytes(model, afd.ffn, tokens=tokens, quantization=engine.quantization)
    memory = section.gpu_memory_utilization * gpu.usable
    if held > memory:
        raise ValueError(
            f"afd.ffn is {afd.ffn}: an FFN rank needs {held / 1e9:.0f} GB for its experts and their activations, but"
            f" has {memory / 1e9:.0f} GB: raise afd.ffn, or lower max_num_batched_tokens"
        )


def afd_cost(engine: DescribedEngine, afd: AfdSection, config: EngineConfig) -> AfdCost:
    """The cost of attention ranks and FFN ranks together. Raises ValueError that begins with the key."""
    try:
        stages, host = stage_profile(
            engine.nodes,
            engine.model,
            engine.recipe,
            engine.source,
            engine.host,
            engine.tp,
            afd.ffn,
            engine.note,
            _ffn_gpu(afd),
        )
    except ConfigError as error:
        raise of_profile(error) from None
    ranks, host = _ranks(afd), host_cost(engine, host)
    try:
        return AfdCost(stages, config, ranks, host, engine.tp)
    except ValueError as error:
        raise ValueError(f"profile: {error}") from None


def _ranks(afd: AfdSection) -> AttentionFFN:
    try:
        return AttentionFFN(
            afd.attention,
            afd.ffn,
            afd.bandwidth,
            afd.latency,
            afd.micro_batches,
            afd.serial_links,
            afd.dbo_decode_token_threshold,
            afd.dbo_prefill_token_threshold,
        )
    except ValueError as error:
        raise ValueError(f"afd.{error}") from None


def _ffn_gpu(afd: AfdSection) -> GPU | None:
    """The GPU of FFN ranks; None: the GPU of the attention ranks."""
    return None if afd.ffn_gpu is None else gpu_of(afd.ffn_gpu, "afd.ffn_gpu")
