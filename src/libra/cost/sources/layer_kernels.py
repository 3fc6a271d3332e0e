"""Seconds of a layer's kernels on a GPU, with a roofline for each kernel.

Invariant: weights and KV are divided once by the tensor-parallel degree. No kernel is faster than its arithmetic and
its memory traffic allow at the given rates.

A kernel takes max(FLOPs / rate, bytes / bandwidth) + a fixed time (Williams et al. 2009, "Roofline"; the fixed time is
launch, ramp-up and tail). A layer is norms, QKV, attention, output projection, all-reduce, gated MLP or experts, and a
second all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from libra.cost import transfer
from libra.cost.grid import Array
from libra.cost.quantization import ACTIVATION_BYTES, Quantization
from libra.cost.sources.rates import Rates
from libra.cost.transfer import Fabric, Group
from libra.hardware.cluster import GPU
from libra.hardware.context import ALL, Read
from libra.hardware.layers import LayerKind, Mixer
from libra.hardware.mlp import MLP
from libra.hardware.model import ModelSpec
from libra.hardware.stored_weights import MATRIX_KINDS

PCIE = 64e9  # bytes/s of PCIe 5 with 16 lanes, one direction; only NVLink is faster


def all_reduce_seconds(reached: Rates, link: float, tp: int, size: ArrayLike) -> Array:
    """Ring all-reduce of `size` bytes: a GPU moves 2 * (tp - 1) / tp of them (Patarasuk and Yuan 2009); 0 at tp 1.

    Over PCIe, more than two GPUs communicate through the CPUs. On L40S, the bus bandwidth is 19 GB/s for two GPUs, 3.7
    for four and 1.9 for eight (tables of aiconfigurator-core 0.12). So four or more GPUs reach about 0.8 / tp of the
    bandwidth of two.
    """
    moved = 2 * (tp - 1) / tp * np.asarray(size, dtype=float)
    met = 0.8 / tp if tp > 2 and link <= PCIE else 1.0
    fixed = (reached.link_latency + reached.peer_latency * (tp - 1)) if tp > 1 else 0.0
    seconds: Array = moved / (met * reached.link_share * link) + fixed
    return seconds


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A kind of weights: bytes per weight, and the speed of its products relative to bf16."""

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
    """The kernels of one GPU's share of the model; every method returns seconds."""

    reached: Rates
    model: ModelSpec
    tp: int
    stored: StoredNumbers
    link: float
    fabric: Fabric | None = None  # None: all `tp` devices are in one node

    def linear(self, tokens: Array, inputs: float, outputs: float) -> Array:
        """Product with a matrix of attention."""
        return self._product(tokens, inputs, outputs, self.stored.attention)

    def _product(self, tokens: Array, inputs: float, outputs: float, matrix: _Matrix) -> Array:
        traffic = ACTIVATION_BYTES * tokens * (inputs + outputs) + matrix.bytes * inputs * outputs
        return self._bound(2 * tokens * inputs * outputs / (self.reached.linear_flops * matrix.faster), traffic)

    def _grouped(self, tokens: Array, touched: Array, inputs: float, outputs: float) -> Array:
        """Product with a matrix of each expert that has tokens."""
        matrix = self.stored.experts
        traffic = ACTIVATION_BYTES * tokens * (inputs + outputs) + matrix.bytes * touched * inputs * outputs
        return self._bound(2 * tokens * inputs * outputs / (self.reached.expert_flops * matrix.faster), traffic)

    def _bound(self, computing: Array, traffic: Array) -> Array:
        seconds: Array = np.maximum(computing, traffic / self.reached.bandwidth)
        return seconds + self.reached.linear_launch

    def pass_over(self, elements: Array) -> Array:
        return ACTIVATION_BYTES * elements / self.reached.bandwidth + self.reached.pass_launch

    def decode_attention(self, tokens: Array, cached: Array) -> Array:
        """The mixers of all layers, for one token of each of `tokens` sequences with `cached` tokens in total."""
        return self._over_mixers(lambda mixer: self._decode(mixer, tokens, cached))

    def prefill_attention(self, tokens: Array, prefix: Array) -> Array:
        """The mixers of all layers, for `tokens` new tokens of a sequence after `prefix` earlier ones."""
        return self._over_mixers(lambda mixer: self._prefill(mixer, tokens, prefix))

    def _over_mixers(self, seconds: Callable[[Mixer], Array]) -> Array:
        counts = Counter[Mixer]()
        for kind, count in self.model.counted:
            if kind.mixer is not None:
                counts[kind.mixer] += count
        return _summed(count * seconds(mixer) for mixer, count in counts.items())

    def _decode(self, mixer: Mixer, tokens: Array, cached: Array) -> Array:
        """The mixer of one layer, which reads all visible keys of the batch, or reads and writes all states. Latent
        attention is absorbed (DeepSeek-V2, section 2.1): its compressed vector serves all heads, and no degree divides
        it.
        """
        reached, reads, again = self.reached, mixer.reads(self.tp), mixer.decompressed(self.tp)
        projections = np.zeros_like(tokens) if again is None else self.linear(tokens, *again)
        if not reads:
            states = sum(part.state for part in mixer.kept(self.tp))
            return 2 * tokens * states / reached.bandwidth + reached.decode_launch + 0.0 * cached
        seconds = _summed(self._read_seconds(it, tokens, cached) for it in reads)
        attention: Array = seconds + reached.decode_launch + projections
        return attention

    def _read_seconds(self, read: Read, tokens: Array, cached: Array) -> Array:
        seen = cached if read.reach == ALL else tokens * read.reach.seen(cached / tokens)
        moved = seen * (self.stored.kv_bytes * read.numbers + read.plain)
        seconds: Array = np.maximum(moved / self.reached.cache_bandwidth, seen * read.flops / self.reached.linear_flops)
        return seconds

    def _prefill(self, mixer: Mixer, tokens: Array, prefix: Array) -> Array:
        """The causal mixer of one layer: a token attends to the prefix and, on average, to half of its own chunk.
        Latent attention decompresses the cached vectors again for every chunk, unless an indexer chooses among them.
        """
        reads, again = mixer.reads(self.tp), mixer.decompressed(self.tp)
        flops = mixer.token_flops / self.tp * tokens + 0.0 * prefix
        for it in reads:
            flops = flops + it.pair_flops * it.reach.pairs(tokens, prefix)
        projections = np.zeros_like(flops)
        if again is not None:
            whole = len(reads) == 1 and reads[0].reach == ALL
            projections = self.linear(tokens + prefix if whole else tokens + 0.0 * prefix, *again)
        attention: Array = flops / self.reached.attention_flops + self.reached.attention_launch + projections
        return attention

    def rest(self, tokens: Array, logits: Array) -> Array:
        """All layers without attention for `tokens` tokens, and the output head for `logits` tokens."""
        alike = Counter[tuple[Mixer | None, int, int]]()
        for kind, count in self.model.counted:
            alike[kind.mixer, kind.norms, kind.parts] += count
        seconds = _summed(
            count * (norms * self._norm(tokens) + parts * self._reduce(tokens) + self._projections(mixer, tokens))
            for (mixer, norms, parts), count in alike.items()
        )
        seconds = seconds + self.head(logits)
        for mlp, count in self._dense():
            seconds = seconds + count * self._mlp(tokens, mlp.intermediate, self.stored.dense, mlp.gated)
        if self.model.experts is not None:
            seconds = seconds + self.model.sparse_layers * self._experts(tokens)
        return seconds

    def _dense(self) -> Iterator[tuple[MLP, int]]:
        """Dense MLPs, and their numbers of layers."""
        counts = Counter[MLP]()
        for kind, count in self.model.counted:
            if kind.dense is not None:
                counts[kind.dense] += count
        return iter(counts.items())

    def _reduce(self, tokens: Array) -> Array:
        size = ACTIVATION_BYTES * tokens * self.model.hidden
        if self.fabric is None or self.tp <= self.fabric.gpus:
            return all_reduce_seconds(self.reached, self.link, self.tp, size)
        # Each device then exchanges its part of the node's sum with other nodes.
        gpus = self.fabric.gpus
        inside = all_reduce_seconds(self.reached, self.link, gpus, size)
        return inside + transfer.all_reduce_seconds(size / gpus, Group(self.tp // gpus, gpus), self.fabric)

    def _norm(self, tokens: Array) -> Array:
        return self.pass_over(4 * tokens * self.model.hidden)  # the residual and the layer's output, read and written

    @property
    def expert_width(self) -> int:
        """Width of the input of routed experts."""
        assert self.model.experts is not None
        return self.model.experts.width(self.model.hidden)

    def decode_beside_experts(self, tokens: Array, cached: Array) -> Array:
        """The work of an attention rank if FFN ranks have the experts: layers with experts, without the experts
        themselves, and layers without an MLP. Arguments are those of `decode_attention`.
        """
        return self._beside(tokens, lambda mixer: self._decode(mixer, tokens, cached))

    def prefill_beside_experts(self, tokens: Array, prefix: Array) -> Array:
        return self._beside(tokens, lambda mixer: self._prefill(mixer, tokens, prefix))

    def _beside(self, tokens: Array, attention: Callable[[Mixer], Array]) -> Array:
        each = []
        for kind, count in self.model.counted:
            if kind.dense is not None:
                continue
            seconds = self._beside_experts(kind, tokens)
            each.append(count * (seconds if kind.mixer is None else attention(kind.mixer) + seconds))
        return _summed(each)

    def _beside_experts(self, kind: LayerKind, tokens: Array) -> Array:
        """One layer, without routed experts and attention. The all-reduce after the experts is not part of it."""
        reduce, experts = self._reduce(tokens), kind.experts
        seconds = kind.norms * self._norm(tokens)
        if kind.mixer is not None:
            seconds = seconds + reduce + self._projections(kind.mixer, tokens)
        if experts is None:
            return seconds
        seconds = seconds + self.router(tokens)
        if experts.latent:
            seconds = seconds + self._latent(tokens)
        if experts.shared_intermediate:
            seconds = seconds + self._mlp(tokens, experts.shared_intermediate, self.stored.shared, experts.gated)
            seconds = seconds + reduce
        return seconds

    def outside(self, tokens: Array) -> Array:
        """MLPs of the layers without experts, and the output head."""
        seconds = self.head(tokens)
        for mlp, count in self._dense():
            reduce = self._reduce(tokens)
            seconds = seconds + count * (self._mlp(tokens, mlp.intermediate, self.stored.dense, mlp.gated) + reduce)
        return seconds

    def head(self, logits: Array) -> Array:
        return self._product(logits, self.model.hidden, self.model.vocab / self.tp, _PLAIN)

    def router(self, tokens: Array) -> Array:
        model, experts = self.model, self.model.experts
        assert experts is not None
        return self._product(tokens, model.hidden, experts.count, _PLAIN)

    def experts_of(self, tokens: Array, ranks: int) -> Array:
        """The experts of one layer on one of `ranks` GPUs that divide them (see `_experts`). All ranks together have
        `tokens` tokens; uniform routing is assumed.
        """
        experts = self.model.experts
        assert experts is not None
        touched = experts.count / ranks * (1 - (1 - experts.active / experts.count) ** tokens)
        routed, width = tokens * experts.active / ranks, self.expert_width
        wide = 2 if experts.gated else 1
        seconds = 2 * self.pass_over(2 * routed * width) + self.pass_over((wide + 1) * routed * experts.intermediate)
        for inputs, outputs in ((width, wide * experts.intermediate), (experts.intermediate, width)):
            seconds = seconds + self._grouped(routed, touched, inputs, outputs)
        return seconds

    def _projections(self, mixer: Mixer | None, tokens: Array) -> Array:
        if mixer is None:
            return np.zeros_like(tokens)
        return _summed(self.linear(tokens, *shape) for shape in mixer.products(self.model.hidden, self.tp))

    def _latent(self, tokens: Array) -> Array:
        """The projections around routed experts, which every GPU has."""
        hidden, width = self.model.hidden, self.expert_width
        down = self._product(tokens, hidden, width, self.stored.shared)
        return down + self._product(tokens, width, hidden, self.stored.shared)

    def _mlp(self, tokens: Array, intermediate: float, matrix: _Matrix, gated: bool = True) -> Array:
        share, hidden = intermediate / self.tp, self.model.hidden
        wide = 2 if gated else 1
        up, down = self._product(tokens, hidden, wide * share, matrix), self._product(tokens, share, hidden, matrix)
        return up + self.pass_over((wide + 1) * tokens * share) + down

    def _experts(self, tokens: Array) -> Array:
        """The MLP of one layer with experts. Tokens are gathered by expert, grouped products read each used expert
        once, and the outputs are summed by weight. Every GPU gathers and sums all tokens. Uniform routing is assumed.
        """
        experts = self.model.experts
        assert experts is not None
        touched = experts.count * (1 - (1 - experts.active / experts.count) ** tokens)
        routed, share, width = tokens * experts.active, experts.intermediate / self.tp, self.expert_width
        moved, wide = 2 * self.pass_over(2 * routed * width), 2 if experts.gated else 1
        seconds = self.router(tokens) + moved + self.pass_over((wide + 1) * routed * share)
        for inputs, outputs in ((width, wide * share), (share, width)):
            seconds = seconds + self._grouped(routed, touched, inputs, outputs)
        if experts.latent:
            seconds = seconds + self._latent(tokens)
        if experts.shared_intermediate:
            seconds = seconds + self._mlp(tokens, experts.shared_intermediate, self.stored.shared, experts.gated)
        return seconds


def _summed(seconds: Iterable[Array]) -> Array:
    """The sum of one or more terms."""
    every = iter(seconds)
    total = next(every)
    for more in every:
        total = total + more
    return total
