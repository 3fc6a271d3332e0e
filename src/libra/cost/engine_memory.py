"""KV cache capacity of one rollout engine, in tokens.

Invariant: weights and KV are divided once by the tensor-parallel degree and once by the pipeline stages. All other
memory of an engine is computed here, and the KV cache gets the remainder. vLLM takes `gpu_memory_utilization` of the
memory that PyTorch reports, and subtracts weights, the peak of a profiling run and captured graphs. The constants come
from vLLM's logs of each item, by version; `python -m benchmarks.public` compares the sum with other logs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

from libra.cost.collectives import AllToAll
from libra.cost.graphs import capture_sizes
from libra.cost.quantization import AS_STORED, Quantization
from libra.hardware.latent import LatentAttention
from libra.hardware.model import ModelSpec

# Tokens of one KV block; the prefix cache keeps whole blocks.
BLOCK = 16  # vLLM's default on GPUs
BLOCK_TOKENS = 32  # block of vLLM's CPU attention
SAMPLED = 1024  # sequences whose logits are in memory together: vLLM's default `max_num_seqs` on large GPUs
BATCHED = 8192  # tokens of an iteration: vLLM's default `max_num_batched_tokens` on large GPUs

_GIB = 2.0**30
# Source: logs of 60 engines with 28 models on H100 by vLLM 0.19, and of Qwen3-14B by 0.15 to 0.19 (llm-d-planner,
# accuracy/accuracy_report.md), with the peak of the profiling run, memory outside of PyTorch, and graphs. The peak is
# the sampler's memory, used after the layers' activations are freed, plus 0.055 GiB in each log.
_REST = 0.055 * _GIB
# Memory outside of PyTorch's allocator on one GPU, by version of vLLM: 1.8 GiB before 0.7 (vllm#10511; vllm#12126
# lowered it to 0.16 GiB), 0.13 GiB up to 0.17, 0.25 GiB from 0.18 on. A group of GPUs adds NCCL's channels, equally
# many for two and for eight GPUs. GiB (GPUs, version) over NVLink: 1.3 (two H200, 0.10), 1.8 and 1.9 (two and four
# H100, 0.19), 0.7 (four B200, 0.27), about 1.2 (eight H200, 2026, and eight A100-40GB, 0.10). Over PCIe the channels
# are in the host's memory: 0.1 to 0.25 (L40S, RTX 3090 and 5090).
_LIBRARIES, _OLD_LIBRARIES, _FIRST_LIBRARIES = 0.25 * _GIB, 0.13 * _GIB, 1.8 * _GIB
_GROUP, _PCIE_GROUP = 1.3 * _GIB, 0.2 * _GIB
# Captured graphs, by the estimates in 20 logs: 0.2 to 0.5 GiB for up to 20 graphs, 0.5 to 1.1 GiB for 86 to 102. The
# number of layers hardly matters. vLLM counts at least 1 MiB for each graph.
_POOL, _GRAPH = 0.2 * _GIB, 6 * 2.0**20
# Not modelled: a start that compiles has up to 1 GiB less KV, since Inductor times kernels (an engine of 0.29 that logs
# its first and second start).
_COUNTED = 4 + 1 / 8  # bytes for each sequence and token of the vocabulary: a count, and a bit of the prompt
_CHUNK = 32_768  # most tokens in fused experts at once, before 0.19: VLLM_FUSED_MOE_CHUNK_SIZE
_DEEPEP = 1024 * 2**20  # bytes of a buffer of DeepEP, for NVLink or for the network: VLLM_DEEPEP_BUFFER_SIZE_MB
_LOW_LATENCY = 256  # most tokens of a rank with low latency, vLLM's default
_CONTEXT_ROWS = 65_536  # tokens of context that latent attention expands at once in long models (vLLM's MLA layers)


@dataclass(frozen=True, slots=True)
class Profiling:
    """The parts of vLLM's profiling run that differ between versions."""

    logit: float = 2.0  # bytes per logit while the sampler runs; the newer model runner samples from 16 bits
    counted: float = _COUNTED  # bytes per logit that stay: counts of each token, for penalties
    libraries: float = _LIBRARIES  # bytes outside of PyTorch's allocator, on one GPU
    keeps_workspace: bool = True  # the workspace of experts stays; older versions free it with the activations
    chunk: float = inf  # tokens that go through experts at once
    graphs: bool = True  # captured graphs count; in older versions they exceed `gpu_memory_utilization`

    @classmethod
    def of(cls, version: str) -> Profiling:
        """The profiling run of a version such as `0.9.2`. Raises ValueError for an invalid version.

        Before 0.17, the sampler sorted all logits (vllm#33538). This took 37.7 bytes per logit in logs of 0.10.2 and
        0.15, and 35 in a log of 0.6 (vllm#10511). When profiling began to sample (vllm#13594, for 0.8), opt-125m showed
        44 bytes. Before 0.29, the sampler had fp32 logits, probabilities and noise. 0.12 has a separate workspace for
        experts, and 0.21 counts graphs by default (vllm#38284).
        """
        found = re.match(r"(\d+)\.(\d+)(\.|$)", version)
        if found is None:
            raise ValueError(f"vllm_version is {version!r}: give it as vLLM does, such as 0.9.2")
        release = (int(found[1]), int(found[2]))
        newer = release >= (0, 29)
        sorted_ = 44.0 if (0, 8) <= release < (0, 10) else 37.7
        return cls(
            logit=sorted_ if release < (0, 17) else cls().logit if newer else 2.0 + 4 + 4 + 4,
            counted=_COUNTED if newer else 0.0,
            libraries=(_FIRST_LIBRARIES if release < (0, 7) else _OLD_LIBRARIES if release < (0, 18) else _LIBRARIES),
            keeps_workspace=release >= (0, 12),
            chunk=inf if release >= (0, 19) else _CHUNK,
            graphs=release >= (0, 21),
        )


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
    switched: bool = True,
    profiling: Profiling = Profiling(),
) -> int:
    """Tokens in the KV cache of an engine; 0 if the weights leave no memory.

    The engine has `pp` stages of `tp` devices, and may use a share of `utilization` of the `memory` bytes of each
    device (`GPU.usable`). Every stage keeps its layers' KV of all tokens, so the fullest stage sets the limit. `taken`
    bytes of each device belong to another engine, and a drafter needs `kv_beside` bytes per byte of KV. Other arguments
    are those of `held_bytes`. Raises ValueError if the degrees do not divide the model.

    If layers keep windows or states, the result is for sequences of `context` tokens each, by default the model's
    longest. A sequence's bytes are concave in its length, so a batch with this mean length needs no more memory.
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
        switched=switched,
        profiling=profiling,
    )
    each = quantization.kv_bytes_per_token(model, tp, pp, context) * (1 + kv_beside)
    return tokens_in(memory * utilization - taken - held, each)


def tokens_in(free: float, each: float) -> int:
    """Tokens of KV of `each` bytes in `free` bytes of a device, in whole blocks."""
    return int(max(0.0, free) / each) // BLOCK * BLOCK


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
    switched: bool = True,
    profiling: Profiling = Profiling(),
) -> float:
    """Bytes that an engine needs on each of its devices in addition to KV.

    Like vLLM's profiling run, the engine reserves the larger of two amounts. The first is the activations of one
    iteration of `batched_tokens` tokens in bf16: three vectors of the hidden width, and the gate, up and activated
    vectors of an MLP. The second is the logits of `seqs` sequences, which every device gathers, plus two vectors per
    token. The workspace of experts is added. Without `routed`, routed experts are on other devices; without `graphs`,
    no graph is captured. For `switched` see `context_bytes`.
    """
    widest = max(model.intermediate, 0 if model.experts is None else model.experts.shared_intermediate)
    layers = batched_tokens * 2 * (3 * model.hidden + 3 * widest / tp) + _expanded_context(model, tp)
    sampled = batched_tokens * 2 * 2 * model.hidden + seqs * model.vocab * profiling.logit
    weights, workspace = quantization.weight_bytes(model, tp, pp), 0.0
    if routed:
        workspace = expert_workspace(model, min(batched_tokens, profiling.chunk), tp)
    else:
        weights -= quantization.matrix_bytes(model, "experts") * model.routed_parameters / tp
    peak = max(layers, sampled) + workspace if profiling.keeps_workspace else max(layers + workspace, sampled)
    if model.tower:  # image embeddings, and the inputs into which they are merged
        peak += batched_tokens * 2 * 2 * model.hidden
    kept = seqs * model.vocab * profiling.counted
    beside = context_bytes(tp, graphs, seqs=seqs, batched_tokens=batched_tokens, switched=switched, profiling=profiling)
    return beside + peak + kept + weights


def context_bytes(
    tp: int = 1,
    graphs: bool = True,
    *,
    seqs: int = SAMPLED,
    batched_tokens: int = BATCHED,
    switched: bool = True,
    profiling: Profiling = Profiling(),
) -> float:
    """Bytes of a device that do not depend on the model: libraries, captured graphs, and buffers of a group of `tp`
    devices. `switched`: their link is faster than PCIe (`GPU.switched`).
    """
    held = _REST + profiling.libraries
    if tp > 1:
        held += _GROUP if switched else _PCIE_GROUP
    if graphs and profiling.graphs:
        sizes = capture_sizes(seqs, batched_tokens)
        held += _POOL + _GRAPH * (len(sizes) + sum(size <= seqs for size in sizes))
    return held


def _expanded_context(model: ModelSpec, tp: int) -> float:
    """Bytes of keys and values that latent attention expands from its context at once; 0 if an indexer chooses keys."""
    latent = [it.mixer for it in model.kinds if isinstance(it.mixer, LatentAttention)]
    widths = [it.heads * (it.nope_dim + it.value_dim) for it in latent if it.indexer is None and not it.topk]
    return 2 * _CONTEXT_ROWS * max(widths, default=0) / tp


def expert_workspace(model: ModelSpec, tokens: float, tp: int = 1) -> float:
    """Bytes that fused experts need for `tokens` tokens on a device with a `tp`-th of each expert; 0 without experts.
    There is a row per token and expert, before and after each product (vLLM, `TritonExperts.workspace_shapes`).
    """
    experts = model.experts
    if experts is None:
        return 0.0
    width = experts.intermediate / tp
    rows, through = tokens * experts.active, experts.width(model.hidden)
    return rows * 2 * (max(width, through) + max((2 if experts.gated else 1) * width, through))


def drafter_memory(
    model: ModelSpec,
    tp: int,
    drafter: ModelSpec | None,
    *,
    quantization: Quantization = AS_STORED,
    dp: int = 1,
) -> tuple[float, float]:
    """Bytes of a drafter's weights on each device, and its KV bytes per KV byte of the model. `drafter` is a separate
    model that is not quantized. None: the drafter is a layer like the model's layers, and `dp` ranks divide its
    experts.
    """
    if drafter is None:
        elsewhere = (1 - 1 / dp) * quantization.matrix_bytes(model, "experts") * model.routed_parameters / tp
        return (quantization.weight_bytes(model, tp) - elsewhere) / model.layers, 1 / model.layers
    kv = quantization.kv_bytes_per_token(drafter, tp) / quantization.kv_bytes_per_token(model, tp)
    return AS_STORED.weight_bytes(drafter, tp), kv


def expert_rank_bytes(
    model: ModelSpec,
    ranks: int,
    *,
    tokens: int,
    way: AllToAll = "allgather_reducescatter",
    internode: bool = False,
    quantization: Quantization = AS_STORED,
    profiling: Profiling = Profiling(),
) -> float:
    """Bytes for experts on each of `ranks` devices that divide them: weights, received tokens, workspace, and buffers.

    `tokens` is the number of tokens of all ranks, and experts are chosen equally often. A device receives all tokens,
    or only tokens with an expert on the device (DeepEP, high throughput). With low latency, each expert has room for
    all tokens of all ranks, up to `_LOW_LATENCY` per rank. Two buffers of sent and two of received tokens have the same
    room (DeepEP, `get_low_latency_rdma_size_hint`).
    """
    experts, hidden = model.experts, model.hidden
    weights = quantization.matrix_bytes(model, "experts") * model.routed_parameters / ranks
    if experts is None or way == "allgather_reducescatter":
        return weights + 2 * tokens * hidden + expert_workspace(model, min(tokens, profiling.chunk))
    if way == "deepep_high_throughput":
        arrived = tokens * (1 - (1 - 1 / ranks) ** experts.active)
        own = min(tokens / ranks, profiling.chunk)  # the workspace has a row for each copy of these tokens
        return weights + 2 * arrived * hidden + expert_workspace(model, own) + (1 + internode) * _DEEPEP
    rows = experts.count * min(tokens / ranks, _LOW_LATENCY)
    message = 16 + 2 * hidden + hidden / 32  # a header, numbers of 2 bytes, and a scale of 4 bytes per 128 numbers
    return weights + expert_workspace(model, rows / experts.active) + 4 * rows * message + _DEEPEP


def ffn_rank_bytes(model: ModelSpec, ranks: int, *, tokens: int, quantization: Quantization = AS_STORED) -> float:
    """Bytes on each of `ranks` devices that hold only their share of the experts. `tokens` tokens arrive from all
    attention ranks; each token needs memory for itself and for an MLP's vectors, as in `held_bytes`.
    """
    experts = model.experts
    assert experts is not None
    rows = tokens * experts.active / ranks
    activations = rows * 2 * (2 * experts.width(model.hidden) + 3 * experts.intermediate)
    return context_bytes() + activations + quantization.matrix_bytes(model, "experts") * model.routed_parameters / ranks
