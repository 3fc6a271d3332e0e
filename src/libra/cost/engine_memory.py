"""How many tokens of context one rollout engine holds.

Invariant: weights and KV are divided by the tensor-parallel degree once and by the pipeline stages once; what the
engine needs besides is stated here and taken off before the KV cache gets the rest.
"""

from __future__ import annotations

from libra.cost.quantization import AS_STORED, Quantization
from libra.hardware.model import ModelSpec

# Tokens of one KV block; the prefix cache keeps whole blocks.
BLOCK = 16  # vLLM's default on GPUs
BLOCK_TOKENS = 32  # what vLLM's CPU attention works on
CONTEXT = 1.5e9  # bytes: assumed for the CUDA context, NCCL's buffers and captured CUDA graphs
SAMPLED = 1024  # sequences whose logits are in memory together: vLLM's default `max_num_seqs` on large GPUs


def kv_tokens(
    model: ModelSpec,
    memory: float,
    utilization: float,
    tp: int,
    *,
    batched_tokens: int,
    quantization: Quantization = AS_STORED,
    pp: int = 1,
    taken: float = 0.0,
    kv_beside: float = 0.0,
    routed: bool = True,
) -> int:
    """Tokens of KV cache of an engine of `pp` stages of `tp` devices with `memory` bytes each, of which it may use a
    share of `utilization`; 0 when the weights leave no room. Every stage keeps its layers' KV of every token, so the
    fullest stage decides. `taken` bytes of each device are another engine's, and
    with each byte of KV there are `kv_beside` of a drafter's; without `routed`, the experts that tokens
    are routed to are on other devices (attention and FFN apart). Raises ValueError where the degrees do not divide the
    model.
    """
    held = held_bytes(model, tp, batched_tokens=batched_tokens, quantization=quantization, pp=pp, routed=routed)
    free = memory * utilization - taken - held
    tokens = int(max(0.0, free) / (quantization.kv_bytes_per_token(model, tp, pp) * (1 + kv_beside)))
    return tokens // BLOCK * BLOCK


def held_bytes(
    model: ModelSpec,
    tp: int,
    *,
    batched_tokens: int,
    quantization: Quantization = AS_STORED,
    pp: int = 1,
    routed: bool = True,
) -> float:
    """Bytes that an engine needs on each of its devices besides KV.

    As vLLM's profiling run does, it sets aside the activations of one iteration of `batched_tokens` tokens in bf16
    (two residual streams, and the gate, up and activated vectors of an MLP) and fp32 logits of `SAMPLED` sequences.
    """
    widest = max(model.intermediate, _expert_width(model, routed))
    activations = batched_tokens * 2 * (2 * model.hidden + 3 * widest / tp)
    logits = SAMPLED * model.vocab * 4 / tp
    held = CONTEXT + activations + logits + quantization.weight_bytes(model, tp, pp)
    return held if routed else held - quantization.matrix_bytes(model, "experts") * model.routed_parameters / tp


def drafter_memory(
    model: ModelSpec,
    tp: int,
    drafter: ModelSpec | None,
    *,
    quantization: Quantization = AS_STORED,
    dp: int = 1,
) -> tuple[float, float]:
    """Bytes of weights on each device of what proposes drafts, and bytes of its KV for each of the model's. It is a
    model of its own, not quantized; or, without one, a layer like the model's, whose experts `dp` ranks divide."""
    if drafter is None:
        elsewhere = (1 - 1 / dp) * quantization.matrix_bytes(model, "experts") * model.routed_parameters / tp
        return (quantization.weight_bytes(model, tp) - elsewhere) / model.layers, 1 / model.layers
    kv = quantization.kv_bytes_per_token(drafter, tp) / quantization.kv_bytes_per_token(model, tp)
    return AS_STORED.weight_bytes(drafter, tp), kv


def ffn_rank_bytes(model: ModelSpec, ranks: int, *, tokens: int, quantization: Quantization = AS_STORED) -> float:
    """Bytes that each of `ranks` devices needs that divide the experts and have nothing else, for `tokens` tokens of
    all attention ranks together: what comes, and an MLP's vectors of it, as above."""
    experts = model.experts
    assert experts is not None
    rows = tokens * experts.active / ranks
    activations = rows * 2 * (2 * model.hidden + 3 * experts.intermediate)
    return CONTEXT + activations + quantization.matrix_bytes(model, "experts") * model.routed_parameters / ranks


def _expert_width(model: ModelSpec, routed: bool) -> int:
    experts = model.experts
    if experts is None:
        return 0
    return (experts.active * experts.intermediate if routed else 0) + experts.shared_intermediate
