"""Device memory that training takes, item by item.

Invariant: bytes are for the fullest device at its peak, and each item is divided only by degrees that divide it. Sizes
are bytes.

Sources. Model states: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sec. 3.1 and 5. Activations: Korthikanti et
al. 2022 (arXiv 2205.05198), sec. 4, counted again for gated MLPs and grouped-query attention, without dropout and
with FlashAttention (no scores are kept), in sequence parallelism. In-flight micro-batches of 1F1B: Narayanan et al.
2021 (arXiv 2104.04473), sec. 2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from libra.config.recipe import Execution, TrainingBytes
from libra.hardware.attention import Attention
from libra.hardware.layers import LayerKind
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import RECOMPUTE, SHARDING, Array, LayoutTable, ParallelLayout

Reference = Literal["none", "resident", "offloaded", "base"]  # base: the frozen weights below adapters

# CUDA context and kernels (0.5-0.8 GiB on A100 and H100), NCCL channels of a few groups, cuBLAS workspaces.
CONTEXT = 2 * 2.0**30
# Share of the device's memory that a caching allocator holds and cannot use. Assumed: with expandable segments, the
# share stays below this.
FRAGMENTATION = 0.05
LOGIT_CHUNK = 2048  # tokens whose logits exist at one time, if logits are computed in chunks

_ZERO2, _ZERO3 = SHARDING.index("zero2"), SHARDING.index("zero3")
_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes on the fullest device."""

    weights: float
    gradients: float
    optimiser: float
    activations: float
    logits: float
    reference: float
    workspace: float  # weights gathered, and gradients not yet reduced, of sharded layouts
    margin: float  # context, communication buffers, fragmentation

    @property
    def total(self) -> float:
        return sum(float(getattr(self, field.name)) for field in fields(self))

    @property
    def largest(self) -> str:
        """Name of the largest item."""
        return max(MEMORY_ITEMS, key=lambda item: float(getattr(self, item)))


MEMORY_ITEMS = tuple(field.name for field in fields(MemoryBreakdown))


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters of the heaviest pipeline stage on one of its devices, before data-parallel ranks divide them.

    Columns are as long as the table. Stages have the same layers. Of several stages, the first holds the input
    embedding and the last the language-model head, which are equally large.
    """

    dense: Array  # everything but routed experts
    experts: Array  # routed experts of this device
    layer: Array  # one layer, routed experts included
    embedding: Array  # the largest single matrix: embedding or head

    @property
    def total(self) -> Array:
        return self.dense + self.experts


def stage_parameters(model: ModelSpec, table: LayoutTable) -> StageParameters:
    tp = table.tp
    embedding = model.vocab * model.hidden / tp
    dense = np.where(table.pp > 1, embedding, model.embedding_parameters / tp) + model.hidden + model.other
    experts, largest = np.zeros_like(dense), np.zeros_like(dense)
    for kind, layers in stage_kinds(model, table):
        held = _beside_routed(kind, model.hidden, tp)
        routed = kind.parameters(model.hidden).routed / table.expert_parts
        dense, experts = dense + layers * held, experts + layers * routed
        if kind.experts or not model.experts:  # layers with experts represent layers without
            largest = np.maximum(largest, held + routed)
    return StageParameters(dense, experts, largest, embedding)


def _beside_routed(kind: LayerKind, hidden: int, tp: Array) -> Array:
    """Parameters of one layer except routed experts, for a column of degrees."""
    whole = kind.parameters(hidden)
    held: Array = per_degree(lambda degree: kind.mixer_parameters(hidden, degree), tp) + whole.plain
    return held + (whole.dense + whole.shared) / tp


def stage_kinds(model: ModelSpec, table: LayoutTable) -> list[tuple[LayerKind, Array]]:
    """Every kind of layer, with a column of its number in the heaviest pipeline stage (`ModelSpec.stage`)."""
    degrees, at = np.unique(table.pp, return_inverse=True)
    each = [[count for _, count in model.stage(int(pp))] for pp in degrees]
    counts = np.array(each, dtype=float).reshape(len(degrees), len(model.kinds))  # also for a table without layouts
    return [(kind, counts[at, index]) for index, kind in enumerate(model.kinds)]


def per_degree(of: Callable[[int], float], degrees: Array) -> Array:
    """`of(degree)` for a column of degrees, evaluated once for each distinct degree."""
    values, at = np.unique(degrees, return_inverse=True)
    return np.array([of(int(value)) for value in values], dtype=float)[at]


def memory_columns(
    model: ModelSpec,
    table: LayoutTable,
    longest: int,
    gpu_memory: float,
    state: TrainingBytes,
    reference: Reference,
    execution: Execution = "fused",
    accumulated: bool = True,
) -> Mapping[str, Array]:
    """The items of `MemoryBreakdown` for every layout of `table`; arguments are those of `training_memory`."""
    parameters = stage_parameters(model, table)
    ranks = table.dp * table.cp
    whole, divided = parameters.total, parameters.dense / ranks + parameters.experts / table.expert_copies
    weights = state.weights * np.where(table.sharding == _ZERO3, divided, whole)
    copied = np.where(table.sharding == _ZERO3, 0.0, state.copies * whole)  # fully sharded: only of gathered units
    gradients = state.gradients * np.where(table.sharding >= _ZERO2, divided, whole)

    tokens = np.maximum(table.micro_tokens, longest) / table.cp
    layers = np.ceil(model.layers / table.pp)
    towers = state.weights * model.tower / table.tp  # stored once, and never trained
    of_layer = _eager_bytes_per_token if execution == "eager" else layer_bytes_per_token
    every, kept = of_layer(model, table, state)
    inside_layer = np.where(table.recompute == _FULL, every, 0.0)  # the layer that is being computed again
    logit_tokens = np.where(table.chunked == 1, np.minimum(tokens, LOGIT_CHUNK), tokens)
    # Fused: logits in the weights' precision, their fp32 copy for log-probabilities, and its gradient. Eager: the fp32
    # copy, the log-probabilities and the gradient of one of the two.
    each_logit = 12 if execution == "eager" else state.weights + 4 + 4
    logits = logit_tokens * each_logit * model.vocab / table.tp
    outside, copies = np.zeros_like(tokens), np.zeros_like(tokens)
    if execution == "eager":
        # After the last layer: the norm's input in fp32, its output before and after its weights, and the gradient.
        outside = tokens * model.hidden * (4 + 3 * state.weights) / table.tp
        # The layer that is computed again also has the gradient of its gated product.
        inside_layer = inside_layer + np.where(
            table.recompute == _FULL, state.product * mlp_width(model) / table.tp, 0.0
        )
        if state.product < state.weights:  # autocast's copies of weights; with recomputation only the head's
            head = state.product * parameters.embedding
            copies = np.where(table.recompute == _FULL, 0.0, state.product * whole)
            logits = logits + np.where(table.recompute == _FULL, head, 0.0)
    # 1F1B: the first stage holds as many micro-batches as there are stages, the last one holds the logits.
    first_held, last_held = held_micro_batches(table)
    first = tokens * (layers * kept * first_held + inside_layer) + copies
    last = tokens * (layers * kept * last_held + inside_layer) + copies + outside
    if not accumulated:
        # Gradients are made while activations are freed, the head's first. A tied embedding adds its gradient last.
        head = state.gradients * parameters.embedding
        begun = layers * kept * tokens + copies + outside + head + np.maximum(logits, inside_layer * tokens)
        ended = gradients + np.maximum(inside_layer * tokens, head if model.tied else 0.0)
        last, logits = np.maximum(begun, ended) - gradients, np.zeros_like(logits)
        first = np.maximum(first - gradients, 0.0)
    one_stage = table.pp == 1
    first_is_fuller = ~one_stage & (first > last + logits)

    # Full sharding gathers one unit ahead and holds a unit's whole gradient until it is reduced.
    unit = np.maximum(parameters.layer, parameters.embedding)
    gathered = state.weights * (unit + parameters.layer) + (state.gradients + state.copies) * unit
    reduced = state.gradients * unit
    workspace = np.where(table.sharding == _ZERO3, gathered, np.where(table.sharding == _ZERO2, reduced, 0.0))
    # The reference is stored like the weights. An offloaded reference is loaded into the memory of gradients, which do
    # not exist then.
    kept_reference = {
        "none": np.zeros_like(weights),
        "base": np.zeros_like(weights),
        "resident": weights,
        "offloaded": np.maximum(0.0, weights - gradients),
    }[reference]
    return {
        "weights": weights + copied + towers,
        "gradients": gradients,
        "optimiser": np.zeros_like(weights) if state.offloaded else state.states * divided,
        "activations": np.where(first_is_fuller, first, last),
        "logits": np.where(first_is_fuller, 0.0, logits),
        "reference": kept_reference,
        "workspace": workspace,
        "margin": np.full(len(table), CONTEXT + FRAGMENTATION * gpu_memory),
    }


def held_micro_batches(table: LayoutTable) -> tuple[Array, Array]:
    """Largest number of micro-batches whose activations the first and the last stage hold, for all their layers.

    With 1F1B these are pp and 1. Interleaved, the first stage holds pp + (pp - 1) / virtual (Korthikanti et al. 2022,
    sec. 4.2.3); the last runs (virtual - 1) * pp parts ahead, each with 1 / virtual of its layers.
    """
    interleaved, pp, virtual = table.virtual > 1, table.pp, table.virtual
    first = np.where(interleaved, pp + (pp - 1) / virtual, pp)
    last = np.where(interleaved, ((virtual - 1) * pp + 1) / virtual, 1.0)
    return first, last


def training_memory(
    model: ModelSpec,
    layout: ParallelLayout,
    longest: int,
    gpu_memory: float,
    state: TrainingBytes,
    reference: Reference,
    execution: Execution = "fused",
    accumulated: bool = True,
) -> MemoryBreakdown:
    """Bytes on the fullest device of `layout`, whose longest trajectory has `longest` tokens.

    `gpu_memory` is the device's memory in bytes, of which a share is lost to fragmentation. The layout fits if `total`
    does not exceed it. MoE tokens are assumed to be spread evenly over experts. Without `accumulated`, a step is one
    micro-batch, and activations are freed while gradients are computed.
    """
    columns = memory_columns(
        model, LayoutTable.of([layout]), longest, gpu_memory, state, reference, execution, accumulated
    )
    return MemoryBreakdown(**{item: float(column[0]) for item, column in columns.items()})


def layer_bytes_per_token(model: ModelSpec, table: LayoutTable, state: TrainingBytes) -> tuple[Array, Array]:
    """Activation bytes per layer and token on one device: all bytes of a layer, and the bytes kept for the backward
    pass. If layers differ, bytes are a mean over the mixers of all layers; MLPs with experts represent all MLPs.
    """
    tp, value = table.tp, state.weights
    norms, product = model.hidden * mean_of(model, lambda kind: float(kind.parts)), mlp_width(model)
    heads = mean_of(model, lambda kind: kind.mixer.saved(tp) if kind.mixer else np.zeros_like(tp, dtype=float))
    routed = np.zeros_like(tp)
    if model.experts:
        experts = model.experts
        # A routed token has a copy for each of its experts, on every rank that has a part of the expert.
        of_token = 2.0 * experts.active * experts.width(model.hidden) + 2 * experts.count
        routed = of_token * np.where(table.whole == 1, 1 / tp, 1.0)
    every = value * (norms / tp + norms / tp + heads + routed) + state.product * 3 * product / tp
    kept = np.where(table.recompute >= _SELECTIVE, every - (value * norms + state.product * product) / tp, every)
    return every, np.where(table.recompute == _FULL, value * model.hidden / tp, kept)


def _eager_bytes_per_token(model: ModelSpec, table: LayoutTable, state: TrainingBytes) -> tuple[Array, Array]:
    """`layer_bytes_per_token` of Transformers' modules, counted by operation. A norm keeps its input in fp32, and its
    output before multiplication with its weights. A projection keeps its input; under autocast, each projection after a
    norm has its own copy. The gated product keeps the gate before and after its activation.
    """
    tp, value, product = table.tp, state.weights, state.product
    fused, kept = layer_bytes_per_token(model, table, state)
    inputs = 5 if product < value else 2  # of queries, keys, values, gate and up
    more = model.hidden * (2 * (4 + value) + inputs * product - 4 * value) / tp
    more = more + mean_of(model, lambda kind: _eager_heads(kind, tp, value, product))
    every = fused + more + product * mlp_width(model) / tp
    return every, np.where(table.recompute == _FULL, kept, kept + every - fused)


def _eager_heads(kind: LayerKind, tp: Array, value: float, product: float) -> Array:
    """Bytes of queries and keys that eager execution keeps beyond fused kernels."""
    mixer = kind.mixer
    if not isinstance(mixer, Attention):
        return np.zeros_like(tp, dtype=float)
    heads = mixer.heads * mixer.head_dim / tp + mixer.kv_heads * mixer.head_dim / np.minimum(tp, mixer.kv_heads)
    more: Array = 2 * heads * (product - value)
    return more if mixer.qk_norm == "none" else more + heads * (4 + product - value)


def mean_of(model: ModelSpec, of: Callable[[LayerKind], Any]) -> Any:
    """Mean of `of(kind)` over all layers."""
    total: Any = None
    for kind, count in model.counted:
        part = of(kind) if len(model.kinds) == 1 else of(kind) * count
        total = part if total is None else total + part
    return total if len(model.kinds) == 1 else total / model.layers


def mlp_width(model: ModelSpec) -> float:
    """Mean width, over all layers, of the product inside the MLP for one token, summed over the token's experts.
    Experts represent the MLPs of layers without experts.
    """
    experts = model.experts
    widest = experts.active * experts.intermediate + experts.shared_intermediate if experts else model.intermediate
    absent = model.count(lambda kind: kind.mlp is None)
    return float(widest) * (1 - absent / model.layers) if absent else float(widest)
