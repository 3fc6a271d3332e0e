"""How many tokens of context one rollout engine holds.

Invariant: weights and KV are divided by the tensor-parallel degree once and by the pipeline stages once; what the
engine needs besides is stated here and taken off before the KV cache gets the rest.
"""

from __future__ import annotations

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
    weight_bytes: float,
    kv_bytes: float,
    batched_tokens: int,
    pp: int = 1,
    taken: float = 0.0,
) -> int:
    """Tokens of KV cache of an engine of `pp` stages of `tp` devices with `memory` bytes each, of which it may use a
    share of `utilization`; 0 when the weights leave no room. Every stage keeps its layers' KV of every token, so the
    fullest stage decides. `taken` bytes of each device are another engine's. Raises ValueError where the degrees do not
    divide the model.
    """
    held = held_bytes(model, tp, weight_bytes=weight_bytes, batched_tokens=batched_tokens, pp=pp)
    free = memory * utilization - taken - held
    tokens = int(max(0.0, free) / model.kv_bytes_per_token(kv_bytes, tp, pp))
    return tokens // BLOCK * BLOCK


def held_bytes(model: ModelSpec, tp: int, *, weight_bytes: float, batched_tokens: int, pp: int = 1) -> float:
    """Bytes that an engine needs on each of its devices besides KV.

    As vLLM's profiling run does, it sets aside the activations of one iteration of `batched_tokens` tokens in bf16
    (two residual streams, and the gate, up and activated vectors of an MLP) and fp32 logits of `SAMPLED` sequences.
    """
    widest = max(model.intermediate, _expert_width(model))
    activations = batched_tokens * 2 * (2 * model.hidden + 3 * widest / tp)
    logits = SAMPLED * model.vocab * 4 / tp
    return CONTEXT + activations + logits + model.weight_bytes(weight_bytes, tp, pp)


def _expert_width(model: ModelSpec) -> int:
    experts = model.experts
    return 0 if experts is None else experts.active * experts.intermediate + experts.shared_intermediate
