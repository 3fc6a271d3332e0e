"""Seconds of the passes over the layers: computation and communication of one rank inside its replica.

Invariant: a pass pays for all tokens and keys of its rank, in any packing, and for the fixed costs of every
micro-batch. Communication counts only if it does not overlap with attention. Times are seconds.

FLOPs: two per multiplied parameter and token; attention by the real, causal lengths. The backward pass takes twice the
forward (Narayanan et al. 2021, arXiv 2104.04473, appendix). Attention's backward takes 2.5 times its forward, since
FlashAttention computes the scores again (Dao 2023, arXiv 2307.08691, sec. 4.1). Tensor and sequence parallelism:
Korthikanti et al. 2022 (arXiv 2205.05198), sec. 4.2. Context parallelism: ring attention (Liu et al. 2023, arXiv
2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from libra.config.recipe import TrainingBytes
from libra.cost.sources.rates import TrainingRates
from libra.cost.train_batch import Batch
from libra.cost.train_memory import Reference, layer_bytes_per_token, mean_of, mlp_width, stage_kinds
from libra.cost.transfer import Fabric, Group, all_gather_seconds, dispatch_seconds, point_to_point_seconds
from libra.hardware.cluster import GPU
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import RECOMPUTE, Array, LayoutTable

ATTENTION_BACKWARD = 2.5  # FLOPs of FlashAttention's backward, relative to its forward
LAUNCH = 8e-6  # seconds per operation, measured with linear layers on A100 and H100
OPERATIONS = 16  # kernels of one layer's forward that are not hidden behind others
# Seconds of the host for the forward pass of one layer with experts; no device is faster. Source: Megatron Bridge
# trains Qwen3-30B-A3B in micro-batches of 4,096 tokens on B200 with 9,299 and 9,691 tokens/s
# (docs/performance-summary-archive.md, 25.11 and 26.02). This is 9.2 and 8.8 ms for a layer's forward and backward, of
# which the device needs 3.5 ms; with four times the tokens, training is 2.8 times as fast. H100, 9.6 ms, is not part of
# the fit. A backward pass launches twice the kernels.
EXPERT_HOST = 3e-3
HIDDEN = 0.8  # assumed: share of a computation behind which communication can hide; both use the same memory and SMs

_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


@dataclass(frozen=True, slots=True)
class Work:
    """The training work, which is the same for every layout."""

    model: ModelSpec
    batch: Batch
    state: TrainingBytes
    reference: Reference
    gpu: GPU
    rates: TrainingRates
    fabric: Fabric
    old_policy: bool = True  # False: pre-training, whose loss needs no log-probabilities of an older policy

    @property
    def scored(self) -> int:
        """Number of forward passes without a backward in a step: for the old policy, and for the reference."""
        return int(self.old_policy) + (self.reference != "none")


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of one rank over all its micro-batches: layers of a middle stage, and additional work of the last
    stage.
    """

    forward: Array
    backward: Array
    attention_forward: Array
    attention_backward: Array
    head: Array  # one forward of the language-model head, less the layers that its stage lacks
    layer_recompute: Array
    exchange_forward: Array  # tensor, context and expert parallelism, sending between stages
    exchange_backward: Array
    hidden: Array  # tensor-parallel exchange behind products of the backward pass; nothing else hides there


def layer_passes(work: Work, table: LayoutTable, counts: Array) -> Passes:
    """The passes of one data-parallel rank over its share of the batch, in `counts` micro-batches per layout.

    Data-parallel exchange is not included. Messages have the type of the weights.
    """
    model, batch, rates, state, fabric = work.model, work.batch, work.rates, work.state, work.fabric
    tp, cp = table.tp, table.cp
    kinds = stage_kinds(model, table)
    layers = np.ceil(model.layers / table.pp)
    tokens = batch.tokens / table.dp / cp  # of one rank, on one of its context-parallel devices
    # Ring attention launches a kernel and a merge for each part of the keys.
    launches = counts * layers * (OPERATIONS + 2 * (cp - 1)) * LAUNCH

    forward, attention, head = _computed(work, table, counts, rates)
    if rates.fused is not None:
        least, slower_attention, slower_head = _computed(work, table, counts, rates.fused)
        # Fused kernels bound layers and attention together, so layers must not gain what attention gains. The backward
        # pass takes the layers twice and attention 2.5 times, hence the ratio.
        gained = ATTENTION_BACKWARD / 2 * np.maximum(0.0, slower_attention - attention)
        forward, head = np.maximum(forward, least + gained), np.maximum(head, slower_head)
    if state.trained < 1:  # products of the adapters
        forward = forward * (1 + state.trained)
    product = mlp_width(model)
    again = tokens / tp * state.weights * layers * (4 * model.hidden + 3 * product) / rates.bandwidth
    layer_recompute = np.select(
        [table.recompute == _FULL, table.recompute == _SELECTIVE], [forward + launches + attention, again], 0.0
    )

    value = state.weights
    micro = tokens / counts
    group = Group(tp)
    whole = all_gather_seconds(micro * model.hidden * value, group, fabric)
    # Gather and scatter, around attention and around the MLP.
    per_layer = np.where(tp > 1, 2 * mean_of(model, lambda kind: float(kind.parts)) * whole, 0.0)
    per_sparse, sparse = np.zeros(len(table)), sum(count for kind, count in kinds if kind.experts)
    products = layers * per_layer  # the part around products that every token needs
    if model.experts:
        width = model.experts.width(model.hidden)
        copies = micro * model.experts.active * width * value
        reached = partial(reached_parts, model.experts)
        between = Group(table.ep, np.where(table.whole == 1, 1.0, tp))
        moved = dispatch_seconds(micro * width * value / tp, reached, between, fabric)
        # Gathers around attention; and around divided experts, whose ranks need every token, or around shared experts.
        shared = 2 * whole if model.experts.shared_intermediate else np.zeros_like(whole)
        gathered = np.where(table.whole == 1, shared, 2 * all_gather_seconds(copies, group, fabric))
        beside = np.where(tp > 1, 2 * whole + gathered, 0.0)
        per_sparse = np.where(table.ep > 1, 2 * moved, 0.0) + beside - per_layer
        products = products + sparse * (np.where(tp > 1, 2 * whole + shared, 0.0) - per_layer)
    next_stage = table.tp * table.cp * table.dp
    to_next = point_to_point_seconds(micro * model.hidden * value / tp, next_stage, fabric)
    sent = np.where(table.pp > 1, table.virtual * to_next, 0.0)
    ring = _ring_seconds(model, table, micro, value, fabric)
    layers_exchange = counts * (layers * per_layer + sparse * per_sparse + sent)
    backward_attention = ATTENTION_BACKWARD * attention
    passed = counts * layers * ring
    ring_forward = np.maximum(0.0, passed - HIDDEN * attention)
    # In the backward pass, the gradients of keys and values are sent with them.
    ring_backward = np.maximum(0.0, 2 * passed - HIDDEN * backward_attention)
    again_exchange = np.where(table.recompute == _FULL, layers_exchange - counts * sent + ring_forward, 0.0)
    exchange_forward, exchange_backward = layers_exchange + ring_forward, layers_exchange + ring_backward
    hidden = np.zeros(len(table))
    if state.trained == 1:
        # In the backward pass, only the gradient of a part's output is gathered before its products. The part's input
        # is gathered again behind the first product. The input's gradient is scattered behind the second product, which
        # gives the weights' gradient (Megatron-LM, core/tensor_parallel/layers.py).
        hidden = np.minimum(counts * products / 2, HIDDEN * 2 * forward)
        exchange_backward = exchange_backward - hidden
    forward, backward = forward + launches, (1 + state.trained) * (forward + launches)
    host = counts * sparse * EXPERT_HOST
    waits = np.maximum(0.0, host - forward - attention - exchange_forward)
    waits_back = np.maximum(0.0, 2 * host - backward - backward_attention - exchange_backward)
    return Passes(
        forward=forward + waits,
        backward=backward + waits_back,
        attention_forward=attention,
        attention_backward=backward_attention,
        head=np.maximum(0.0, head - _spared(model, table, state) * (forward + waits + attention)),
        layer_recompute=layer_recompute + np.where(table.recompute == _FULL, waits, 0.0),
        exchange_forward=exchange_forward,
        exchange_backward=exchange_backward + again_exchange,
        hidden=hidden,
    )


def _spared(model: ModelSpec, table: LayoutTable, state: TrainingBytes) -> Array:
    """Share of a middle stage's layers that the last stage lacks, if the stages do not divide the layers. The last
    stage uses this time for its head. If logits are computed in chunks, the head is computed once more than the layers,
    which reduces the share.
    """
    layers = np.ceil(model.layers / table.pp)
    passes = 2 + state.trained
    missing: Array = (layers * table.pp - model.layers) / layers * passes / (passes + table.chunked)
    return missing


def _computed(work: Work, table: LayoutTable, counts: Array, rates: TrainingRates) -> tuple[Array, Array, Array]:
    """Forward seconds of one rank at these rates: a stage's layers without attention and launches, its attention, and
    the language-model head.
    """
    model, batch, state = work.model, work.batch, work.state
    tp = table.tp
    layers = np.ceil(model.layers / table.pp)
    tokens = batch.tokens / table.dp / table.cp  # of one rank, on one of its context-parallel devices
    mean = batch.context_sum / batch.tokens
    active, count = (model.experts.active, model.experts.count) if model.experts else (0, 0)
    dense, sparse = np.zeros(len(table)), np.zeros(len(table))
    for kind, number in stage_kinds(model, table):
        of_kind = kind.parameters(model.hidden)
        dense = dense + number * (of_kind.total - of_kind.routed)
        sparse = sparse + number * (kind.experts is not None)
    routed = sparse * active * model.expert_parameters
    # A pass reads every expert of the device once per micro-batch, even for few tokens.
    held = sparse * model.expert_parameters * count / table.expert_parts
    reading = counts * held * state.weights / rates.bandwidth
    experts = np.maximum(2 * routed * tokens / tp / rates.experts, reading)
    if rates.casts and model.experts:
        experts = experts + sparse * active * tokens / tp * rates.casts * _cast_width(model.experts, model.hidden) / (
            rates.bandwidth
        )
    forward = 2 * dense * tokens / tp / rates.linear + experts
    if rates.passes:
        every, _ = layer_bytes_per_token(model, table, state)
        forward = forward + rates.passes * every * tokens * layers / rates.bandwidth
    if state.product < state.weights:  # weights are cast for every pass
        forward = forward + counts * (dense / tp + held) * (state.weights + state.product) / rates.bandwidth
    head = 2 * model.vocab * model.hidden * tokens / tp / (rates.head or rates.linear)
    keys = batch.context_sum / table.dp
    # If layers differ, each stage is assumed to have its share of all attention and states.
    attention = model.key_flops(mean) * keys * layers / model.layers / (tp * table.cp) / rates.attention
    if model.token_flops:
        attention = attention + model.token_flops * tokens * layers / model.layers / tp / rates.attention
    return forward, attention, head


def _cast_width(experts: Experts, hidden: int) -> float:
    """A third of the numbers that are cast for one token in one expert: the inputs of products, and the gradients of
    their outputs. A forward pass counts this third, and a backward pass counts it twice.
    """
    through = experts.width(hidden)
    gates = 2 if experts.gated else 1
    return ((through + experts.intermediate) + (through + gates * experts.intermediate)) / 3


def reached_parts(experts: Experts, parts: Array) -> Array:
    """Mean number of parts with one of a token's experts, if the experts are divided into `parts` equal parts. Experts
    are drawn evenly, without replacement, from the groups to which the router is limited (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2).
    """
    share = experts.active_groups / experts.groups
    within = np.where(parts < experts.groups, _drawn_parts(parts, experts.groups, experts.active_groups), parts * share)
    return _drawn_parts(np.maximum(1.0, within), experts.count * share, experts.active)


def _drawn_parts(parts: Array, count: float, draws: int) -> Array:
    """Mean number of hit parts if `draws` of `count` things in `parts` equal parts are drawn (hypergeometric)."""
    missed = np.ones_like(parts)
    for drawn in range(draws):
        missed = missed * np.maximum(0.0, 1 - count / parts / (count - drawn))
    reached: Array = parts * (1 - missed)
    return reached


def _ring_seconds(model: ModelSpec, table: LayoutTable, micro: Array, value: float, fabric: Fabric) -> Array:
    """Seconds to pass the keys and values of one layer and micro-batch once around the context-parallel ring."""
    width = mean_of(model, lambda kind: kind.mixer.ring(table.tp) if kind.mixer else 0.0 * table.tp)
    group = Group(table.cp, table.tp)
    hop = micro * width * value / group.bandwidth(fabric)
    latency = np.where(table.cp > 1, group.latency(fabric), 0.0)
    seconds: Array = (table.cp - 1) * hop + latency
    return seconds
