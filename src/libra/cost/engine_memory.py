"""Tokens of context that one rollout engine holds.

Invariant: weights and KV are divided by the tensor-parallel degree once and by the pipeline stages once; the other
needs of an engine are stated here and subtracted before the KV cache gets the rest. vLLM takes `gpu_memory_utilization`
of the memory that PyTorch reports, and subtracts weights, the peak of a profiling run and captured graphs. Other items
are fitted to logs: see `_EAGER` and below. `python -m benchmarks.public` compares the sum with logs outside of the fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from libra.cost.quantization import AS_STORED, Quantization
from libra.hardware.model import ModelSpec

# Tokens of one KV block; the prefix cache keeps whole blocks.
BLOCK = 16  # vLLM's default on GPUs
BLOCK_TOKENS = 32  # what vLLM's CPU attention works on
SAMPLED = 1024  # sequences whose logits are in memory together: vLLM's default `max_num_seqs` on large GPUs

_GIB = 2.0**30
# Bytes of one logit in vLLM's sampler: bf16, fp32, probabilities and the noise that they are drawn with.
_LOGIT = 2 + 4 + 4 + 4
# Where the sampler sorts (`Profiling`): bf16, and 42 for fp32, sorted values, indices and what the sort works on. The
# profiling run of 1,024 sequences on an H100 took 58,928 tokens of opt-125m more when it began to sample (vllm#13594).
_SORTED = 2 + 42
# Fitted to five public logs: Llama-3.1-8B on A100-40GB without graphs (KV 157,936 tokens) gives the first constant,
# Qwen3-14B AWQ on L40S (190,672), Llama-3.3-70B FP8 on H100 (33,504) and Llama-3.1-8B on RTX 3090 (30,960) the second,
# Llama-3.1-70B on eight A100-40GB (426,639) the third. The 3090's and the last are of versions that sorted logits and
# counted no graphs (`Profiling`), which is about as much for 256 sequences.
_EAGER = 0.06 * _GIB  # what PyTorch does not free, without graphs
_GRAPHS = 0.76 * _GIB  # captured CUDA graphs
_PEER = 0.16 * _GIB  # buffers of NCCL and of all-reduce, for each further device of the tensor-parallel group
_CHUNK = 32_768  # tokens that go through fused experts at once: VLLM_FUSED_MOE_CHUNK_SIZE of older vLLM; 0.32 has none


@dataclass(frozen=True, slots=True)
class Profiling:
    """The profiling run of a version of vLLM, in what versions set aside differently."""

    sorts: bool = False  # the sampler sorts all logits, after the activations are freed: the larger of both counts
    graphs: bool = True  # captured graphs; before, they went beyond `gpu_memory_utilization`

    @classmethod
    def of(cls, version: str) -> Profiling:
        """The run of a version such as `0.9.2`. 0.17 has a sampler that does not sort (vllm#33538), and 0.21 counts
        graphs by default (vllm#38284). Raises ValueError if it is no version."""
        found = re.match(r"(\d+)\.(\d+)(\.|$)", version)
        if found is None:
            raise ValueError(f"vllm_version is {version!r}: give it as vLLM does, such as 0.9.2")
        release = (int(found[1]), int(found[2]))
        return cls(sorts=release < (0, 17), graphs=release >= (0, 21))


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
    seqs: int = SAMPLED,
    graphs: bool = True,
    context: float | None = None,
    profiling: Profiling = Profiling(),
) -> int:
    """Tokens of KV cache of an engine of `pp` stages of `tp` devices with `memory` bytes each (`GPU.usable`), of which
    it may use a share of `utilization`; 0 when the weights leave no room. Every stage keeps its layers' KV of every
    token, so the fullest stage decides. Another engine takes `taken` bytes of each device, and a drafter `kv_beside`
    bytes for each byte of KV. The other arguments are those of `held_bytes`. Raises ValueError if the degrees do not
    divide the model.

    Where layers keep windows or states, tokens are those of sequences of `context` tokens each, by default the model's
    longest: a sequence's bytes are concave in its length, so a batch of this mean length takes no more.
    """
    held = held_bytes(
        model,
        tp,
        batched_tokens=batched_tokens,
        quantization=quantization,
        pp=pp,
        routed=routed,
        seqs=seqs,
        graphs=graphs,
        profiling=profiling,
    )
    free = memory * utilization - taken - held
    tokens = int(max(0.0, free) / (quantization.kv_bytes_per_token(model, tp, pp, context) * (1 + kv_beside)))
    return tokens // BLOCK * BLOCK


def held_bytes(
    model: ModelSpec,
    tp: int,
    *,
    batched_tokens: int,
    quantization: Quantization = AS_STORED,
    pp: int = 1,
    routed: bool = True,
    seqs: int = SAMPLED,
    graphs: bool = True,
    profiling: Profiling = Profiling(),
) -> float:
    """Bytes that an engine needs on each of its devices besides KV.

    As vLLM's profiling run does, it sets aside the activations of one iteration of `batched_tokens` tokens in bf16 (two
    residual streams, and the gate, up and activated vectors of an MLP), the workspace of experts, and the logits of
    `seqs` sequences, which every device gathers. Without `routed`, routed experts are on other devices; without
    `graphs`, nothing is captured.
    """
    widest = max(model.intermediate, 0 if model.experts is None else model.experts.shared_intermediate)
    activations = batched_tokens * 2 * (2 * model.hidden + 3 * widest / tp)
    weights = quantization.weight_bytes(model, tp, pp)
    if routed:
        activations += expert_workspace(model, batched_tokens, tp)
    else:
        weights -= quantization.matrix_bytes(model, "experts") * model.routed_parameters / tp
    peak = activations + seqs * model.vocab * _LOGIT
    if profiling.sorts:
        peak = max(activations, 2 * batched_tokens * model.hidden + seqs * model.vocab * _SORTED)
    return context_bytes(tp, graphs and profiling.graphs) + peak + weights


def context_bytes(tp: int = 1, graphs: bool = True) -> float:
    """Bytes of a device that do not depend on the model: graphs, and buffers of a group of `tp` devices."""
    return _EAGER + (_GRAPHS if graphs else 0.0) + (tp - 1) * _PEER


def expert_workspace(model: ModelSpec, tokens: float, tp: int = 1) -> float:
    """Bytes that fused experts need for `tokens` tokens on a device that has a `tp`-th of each: a row for each token
    and expert, before and after either product (vLLM, `TritonExperts.workspace_shapes`); 0 without experts."""
    experts = model.experts
    if experts is None:
        return 0.0
    width = experts.intermediate / tp
    rows, through = min(tokens, _CHUNK) * experts.active, experts.width(model.hidden)
    return rows * 2 * (max(width, through) + max((2 if experts.gated else 1) * width, through))


def drafter_memory(
    model: ModelSpec,
    tp: int,
    drafter: ModelSpec | None,
    *,
    quantization: Quantization = AS_STORED,
    dp: int = 1,
) -> tuple[float, float]:
    """Bytes of a drafter's weights on each device, and its bytes of KV for each byte of the model's. `drafter` is a
    model of its own, not quantized; None: a layer like the model's, whose experts `dp` ranks divide."""
    if drafter is None:
        elsewhere = (1 - 1 / dp) * quantization.matrix_bytes(model, "experts") * model.routed_parameters / tp
        return (quantization.weight_bytes(model, tp) - elsewhere) / model.layers, 1 / model.layers
    kv = quantization.kv_bytes_per_token(drafter, tp) / quantization.kv_bytes_per_token(model, tp)
    return AS_STORED.weight_bytes(drafter, tp), kv


def expert_rank_bytes(model: ModelSpec, ranks: int, *, tokens: int, quantization: Quantization = AS_STORED) -> float:
    """Bytes that each of `ranks` devices that divide the experts needs for them, when `tokens` tokens of all ranks are
    gathered: weights, the tokens and the workspace."""
    weights = quantization.matrix_bytes(model, "experts") * model.routed_parameters / ranks
    return weights + 2 * tokens * model.hidden + expert_workspace(model, tokens)


def ffn_rank_bytes(model: ModelSpec, ranks: int, *, tokens: int, quantization: Quantization = AS_STORED) -> float:
    """Bytes that each of `ranks` devices needs if they divide the experts and have nothing else. `tokens` tokens of all
    attention ranks arrive; they take memory for themselves and an MLP's vectors, as in `held_bytes`."""
    experts = model.experts
    assert experts is not None
    rows = tokens * experts.active / ranks
    activations = rows * 2 * (2 * experts.width(model.hidden) + 3 * experts.intermediate)
    return context_bytes() + activations + quantization.matrix_bytes(model, "experts") * model.routed_parameters / ranks
