"""Seconds of the kernels of a layer on a GPU: a roofline for each.

Invariant: weights and KV are divided by the tensor-parallel degree once, and no kernel is faster than its arithmetic
or its memory traffic allows at the given rates.

A kernel takes max(FLOPs / rate, bytes / bandwidth) + a fixed time (Williams et al. 2009, "Roofline"; the fixed time is
launch, ramp-up and tail). A layer is norms, QKV, attention, output projection, all-reduce, gated MLP or experts, and a
second all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from libra.cost.grid import Array
from libra.cost.quantization import ACTIVATION_BYTES, Quantization
from libra.cost.sources.rates import Rates
from libra.hardware.cluster import GPU
from libra.hardware.model import ModelSpec
from libra.hardware.stored_weights import MATRIX_KINDS

PCIE = 64e9  # bytes/s of PCIe 5 with 16 lanes, one direction: a link that is not faster is no NVLink


def all_reduce_seconds(reached: Rates, link: float, tp: int, size: ArrayLike) -> Array:
    """Ring all-reduce of `size` bytes: a GPU moves 2 * (tp - 1) / tp of them (Patarasuk and Yuan 2009); 0 at tp 1.

    Over PCIe more than two GPUs meet at the CPUs: on L40S their bus bandwidth is 3.7 GB/s for four and 1.9 for eight
    where two have 19 (tables of aiconfigurator-core 0.12), which is 0.8 / tp of it.
    """
    moved = 2 * (tp - 1) / tp * np.asarray(size, dtype=float)
    met = 0.8 / tp if tp > 2 and link <= PCIE else 1.0
    fixed = (reached.link_latency + reached.peer_latency * (tp - 1)) if tp > 1 else 0.0
    seconds: Array = moved / (met * reached.link_share * link) + fixed
    return seconds


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A kind of weights: bytes of one, and the speed of its products over that in bf16."""

    bytes: float = ACTIVATION_BYTES
    faster: float = 1.0


_PLAIN = _Matrix()


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """A quantisation on one GPU: bytes of its numbers, and speeds of its products."""

    attention: _Matrix
    dense: _Matrix
    shared: _Matrix
    experts: _Matrix
    kv_bytes: float  # of an element

    @classmethod
    def on(cls, gpu: GPU, quantization: Quantization, model: ModelSpec) -> StoredNumbers:
        matrix = {
            kind: _Matrix(quantization.matrix_bytes(model, kind), quantization.faster(gpu, model, kind))
            for kind in MATRIX_KINDS
        }
        return cls(**matrix, kv_bytes=quantization.kv_number(model).bytes)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The kernels of one GPU's share of the model; every method is seconds."""

    reached: Rates
    model: ModelSpec
    tp: int
    stored: StoredNumbers
    link: float

    def linear(self, tokens: Array, inputs: float, outputs: float) -> Array:
        """A matrix of attention."""
        return self._product(tokens, inputs, outputs, self.stored.attention)

    def _product(self, tokens: Array, inputs: float, outputs: float, matrix: _Matrix) -> Array:
        traffic = ACTIVATION_BYTES * tokens * (inputs + outputs) + matrix.bytes * inputs * outputs
        return self._bound(2 * tokens * inputs * outputs / (self.reached.linear_flops * matrix.faster), traffic)

    def _grouped(self, tokens: Array, touched: Array, inputs: float, outputs: float) -> Array:
        """A matrix of each of the experts that are touched."""
        matrix = self.stored.experts
        traffic = ACTIVATION_BYTES * tokens * (inputs + outputs) + matrix.bytes * touched * inputs * outputs
        return self._bound(2 * tokens * inputs * outputs / (self.reached.expert_flops * matrix.faster), traffic)

    def _bound(self, computing: Array, traffic: Array) -> Array:
        seconds: Array = np.maximum(computing, traffic / self.reached.bandwidth)
        return seconds + self.reached.linear_launch

    def pass_over(self, elements: Array) -> Array:
        return ACTIVATION_BYTES * elements / self.reached.bandwidth + self.reached.pass_launch

    def decode_attention(self, tokens: Array, cached: Array) -> Array:
        """One layer: reads all KV of the batch. Latent attention is absorbed (DeepSeek-V2, section 2.1): its one
        compressed vector serves all heads, and no degree divides it."""
        model, reached = self.model, self.reached
        if model.latent is None:
            read = 2 * self.kv_heads * model.head_dim
            flops = 4 * model.heads / self.tp * model.head_dim
            projections = np.zeros_like(tokens)
        else:
            latent = model.latent
            read = latent.kv_rank + latent.rope_dim
            flops = 2 * model.heads / self.tp * (2 * latent.kv_rank + latent.rope_dim)
            heads = model.heads / self.tp
            projections = self.linear(tokens, latent.kv_rank, heads * (latent.nope_dim + latent.value_dim))
        seconds = np.maximum(
            cached * self.stored.kv_bytes * read / reached.cache_bandwidth, cached * flops / reached.linear_flops
        )
        attention: Array = seconds + reached.decode_launch + projections
        return attention

    def prefill_attention(self, tokens: Array, prefix: Array) -> Array:
        """One layer: causal, so that a token attends to the prefix and to half of its own chunk."""
        model, reached = self.model, self.reached
        if model.latent is None:
            per_pair = 4 * model.head_dim
            projections = np.zeros_like(tokens * prefix)
        else:
            latent = model.latent
            per_pair = 2 * (latent.nope_dim + latent.rope_dim + latent.value_dim)
            heads = model.heads / self.tp  # the cached vectors are decompressed again for every chunk
            projections = self.linear(tokens + prefix, latent.kv_rank, heads * (latent.nope_dim + latent.value_dim))
        flops = model.heads / self.tp * per_pair * tokens * (prefix + tokens / 2)
        attention: Array = flops / reached.attention_flops + reached.attention_launch + projections
        return attention

    def rest(self, tokens: Array, logits: Array) -> Array:
        """All layers without their attention, for `tokens` tokens, and the output head for `logits` of them."""
        model = self.model
        reduce = all_reduce_seconds(self.reached, self.link, self.tp, ACTIVATION_BYTES * tokens * model.hidden)
        norm = self.pass_over(4 * tokens * model.hidden)  # the residual and the layer's output, read and written
        each = 2 * norm + 2 * reduce + self._projections(tokens)
        experts = 0 if model.experts is None else model.experts.layers
        seconds: Array = model.layers * each + self.head(logits)
        if model.layers > experts:
            seconds = seconds + (model.layers - experts) * self._mlp(tokens, model.intermediate, self.stored.dense)
        if model.experts is not None:
            seconds = seconds + experts * self._experts(tokens)
        return seconds

    def beside_experts(self, tokens: Array) -> Array:
        """One layer with experts, without the experts and its attention: the work of an attention rank where FFN ranks
        have the experts. The all-reduce after the experts is not part of it."""
        model, experts = self.model, self.model.experts
        assert experts is not None
        reduce = all_reduce_seconds(self.reached, self.link, self.tp, ACTIVATION_BYTES * tokens * model.hidden)
        seconds = 2 * self.pass_over(4 * tokens * model.hidden) + reduce + self._projections(tokens)
        seconds = seconds + self.router(tokens)
        if experts.shared_intermediate:
            seconds = seconds + self._mlp(tokens, experts.shared_intermediate, self.stored.shared) + reduce
        return seconds

    def outside(self, tokens: Array) -> Array:
        """MLPs of the layers without experts, and the output head."""
        model = self.model
        seconds = self.head(tokens)
        if model.dense_layers:
            reduce = all_reduce_seconds(self.reached, self.link, self.tp, ACTIVATION_BYTES * tokens * model.hidden)
            seconds = seconds + model.dense_layers * (self._mlp(tokens, model.intermediate, self.stored.dense) + reduce)
        return seconds

    def head(self, logits: Array) -> Array:
        return self._product(logits, self.model.hidden, self.model.vocab / self.tp, _PLAIN)

    def router(self, tokens: Array) -> Array:
        model, experts = self.model, self.model.experts
        assert experts is not None
        return self._product(tokens, model.hidden, experts.count, _PLAIN)

    def experts_of(self, tokens: Array, ranks: int) -> Array:
        """The experts of one layer on one of `ranks` GPUs that divide them, as in `_experts`. All ranks together have
        `tokens` tokens, and routing is taken to be uniform."""
        model, experts = self.model, self.model.experts
        assert experts is not None
        touched = experts.count / ranks * (1 - (1 - experts.active / experts.count) ** tokens)
        routed = tokens * experts.active / ranks
        seconds = 2 * self.pass_over(2 * routed * model.hidden) + self.pass_over(3 * routed * experts.intermediate)
        for inputs, outputs in ((model.hidden, 2 * experts.intermediate), (experts.intermediate, model.hidden)):
            seconds = seconds + self._grouped(routed, touched, inputs, outputs)
        return seconds

    @property
    def kv_heads(self) -> float:
        """KV heads on each GPU: one or more, even where there are more GPUs than heads."""
        return max(1.0, self.model.kv_heads / self.tp)

    def _projections(self, tokens: Array) -> Array:
        model, heads = self.model, self.model.heads / self.tp
        if model.latent is None:
            before = self.linear(tokens, model.hidden, (heads + 2 * self.kv_heads) * model.head_dim)
            return before + self.linear(tokens, heads * model.head_dim, model.hidden)
        latent = model.latent
        queries = heads * (latent.nope_dim + latent.rope_dim)
        compressed = latent.kv_rank + latent.rope_dim  # on every GPU, like the compressed queries
        if latent.q_rank:
            before = self.linear(tokens, model.hidden, latent.q_rank + compressed)
            before = before + self.linear(tokens, latent.q_rank, queries)
        else:
            before = self.linear(tokens, model.hidden, queries + compressed)
        return before + self.linear(tokens, heads * latent.value_dim, model.hidden)

    def _mlp(self, tokens: Array, intermediate: float, matrix: _Matrix) -> Array:
        share, hidden = intermediate / self.tp, self.model.hidden
        up, down = self._product(tokens, hidden, 2 * share, matrix), self._product(tokens, share, hidden, matrix)
        return up + self.pass_over(3 * tokens * share) + down

    def _experts(self, tokens: Array) -> Array:
        """Grouped products that read each expert they touch once, between a gather of the tokens by expert and their
        weighted sum, which every GPU does in full; routing is taken to be uniform."""
        model, experts = self.model, self.model.experts
        assert experts is not None
        touched = experts.count * (1 - (1 - experts.active / experts.count) ** tokens)
        routed, share = tokens * experts.active, experts.intermediate / self.tp
        moved = 2 * self.pass_over(2 * routed * model.hidden)
        seconds = self.router(tokens) + moved + self.pass_over(3 * routed * share)
        for inputs, outputs in ((model.hidden, 2 * share), (share, model.hidden)):
            seconds = seconds + self._grouped(routed, touched, inputs, outputs)
        if experts.shared_intermediate:
            seconds = seconds + self._mlp(tokens, experts.shared_intermediate, self.stored.shared)
        return seconds
