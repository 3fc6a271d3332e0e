"""Attention with one compressed vector per token for all heads: latent attention, and DeepSeek-V4's attention.

The invariant of `libra.hardware.attention` holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from libra.hardware.attention import Indexer, Products
from libra.hardware.checks import require_at_least
from libra.hardware.context import Array, Reach, Read, Retained
from libra.hardware.matrix import Matrix, heads_refusal

_PACKED = 64 + 8  # bytes of DeepSeek-V4's packed vector beyond one byte per number: 64 numbers have 16 bits, and scales


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one compressed KV vector per token and layer."""

    heads: int
    q_rank: int  # 0: queries are not compressed
    kv_rank: int
    nope_dim: int  # per head, without position
    rope_dim: int  # per head, with position; all heads share one such key
    value_dim: int  # per head
    indexer: Indexer | None = None
    topk: int = 0  # keys that an earlier layer's indexer chose; 0: all keys, or the own indexer chooses
    gated: bool = False  # whether there is an output gate as wide as the values
    bias: bool = False  # whether the projections from and to the hidden width have biases
    kind: Literal["latent"] = "latent"

    def __post_init__(self) -> None:
        require_at_least(0, q_rank=self.q_rank, topk=self.topk)
        require_at_least(
            1,
            heads=self.heads,
            kv_rank=self.kv_rank,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
        )

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        made = []
        if self.q_rank:
            made.append(Matrix("self_attn.q_a_proj", hidden, self.q_rank, 1, self.bias))
            made.append(Matrix("self_attn.q_b_proj", self.q_rank, self.width))
        else:
            made.append(Matrix("self_attn.q_proj", hidden, self.width))
        made.append(Matrix("self_attn.kv_a_proj_with_mqa", hidden, self.kv_rank + self.rope_dim, 1, self.bias))
        made.append(Matrix("self_attn.kv_b_proj", self.kv_rank, self.heads * (self.nope_dim + self.value_dim)))
        made.append(Matrix("self_attn.o_proj", self.heads * self.value_dim, hidden))
        if self.gated:
            made.append(Matrix("self_attn.g_proj", hidden, self.heads * self.value_dim))
        return (*made, *(self.indexer.matrices(self.q_rank or hidden, hidden) if self.indexer else ()))

    def vectors(self, hidden: int, tp: int = 1) -> float:
        return self.q_rank + self.kv_rank + (hidden if self.bias else 0) + (self.indexer.vectors if self.indexer else 0)

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        """Every device keeps the latent vector, since all heads use it. If an indexer chooses keys, 8-bit KV has 16-bit
        positions, and a scale per 128 other numbers (FlashMLA's `fp8_ds_mla`).
        """
        packed = self.kv_rank + 4 * self.kv_rank / 128 + 2 * self.rope_dim
        own = Retained(self.kv_rank + self.rope_dim, least=packed if self._chosen else 0.0)
        return (own, Retained(plain=self.indexer.key_bytes)) if self.indexer else (own,)

    @property
    def _chosen(self) -> int:
        return self.indexer.topk if self.indexer else self.topk

    def reads(self, tp: int = 1) -> tuple[Read, ...]:
        """Reads of absorbed attention in decode (DeepSeek-V2, section 2.1), and with an indexer also in prefill."""
        numbers = self.kv_rank + self.rope_dim
        absorbed = 2 * self.heads / tp * (2 * self.kv_rank + self.rope_dim)
        if self._chosen:
            own = Read(numbers, absorbed, absorbed, Reach(self._chosen))
            return (own, self.indexer.read()) if self.indexer else (own,)
        return (Read(numbers, absorbed, 2 * self.heads / tp * (self.nope_dim + self.rope_dim + self.value_dim)),)

    def products(self, hidden: int, tp: int) -> Products:
        heads = self.heads / tp
        queries = heads * (self.nope_dim + self.rope_dim)
        compressed: float = self.kv_rank + self.rope_dim  # computed on every device, like compressed queries
        if self.gated:
            compressed += heads * self.value_dim
        if self.indexer:
            compressed += self.indexer.head_dim + self.indexer.heads
        out = (heads * self.value_dim, float(hidden))
        if not self.q_rank:
            return ((hidden, queries + compressed), out)
        indexed = self.indexer.heads * self.indexer.head_dim if self.indexer else 0
        return ((hidden, self.q_rank + compressed), (self.q_rank, queries + indexed), out)

    def decompressed(self, tp: int) -> tuple[float, float] | None:
        """(inputs, outputs) of the product that computes keys and values from a compressed vector."""
        return (self.kv_rank, self.heads / tp * (self.nope_dim + self.value_dim))

    @property
    def token_flops(self) -> float:
        return 0.0

    def saved(self, tp: Array) -> Array:
        query = self.width / tp
        compressed = 2.0 * (self.q_rank + self.kv_rank) + self.rope_dim
        found: Array = 2 * query + 2 * self.heads * self.value_dim / tp + compressed
        return found

    def ring(self, tp: Array) -> Array:
        found: Array = (2 * self.nope_dim + self.rope_dim) * self.heads / tp
        return found

    @property
    def width(self) -> int:
        return self.heads * (self.nope_dim + self.rope_dim)

    def tp_refusal(self, tp: int) -> str | None:
        return heads_refusal(tp, self.heads, self.heads)


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """DeepSeek-V4's attention: a window of vectors, and one vector per `ratio` tokens before it.

    A vector is both key and value for all heads. Sources: Transformers' `DeepseekV4Attention`, and vLLM's
    `models/deepseek_v4`.
    """

    heads: int
    head_dim: int
    q_rank: int
    out_rank: int  # of the output projection, per group
    out_groups: int
    window: int
    ratio: int = 0  # tokens per compressed vector; 0: there are no compressed vectors
    indexer: Indexer | None = None  # chooses among the compressed vectors, which then overlap
    kind: Literal["compressed"] = "compressed"

    def __post_init__(self) -> None:
        require_at_least(1, heads=self.heads, head_dim=self.head_dim, q_rank=self.q_rank, window=self.window)
        require_at_least(1, out_rank=self.out_rank, out_groups=self.out_groups)
        require_at_least(0, ratio=self.ratio)

    @property
    def _streams(self) -> int:
        return 2 if self.indexer else 1

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        dim = self.head_dim
        made = [
            Matrix("self_attn.q_a_proj", hidden, self.q_rank, 1),
            Matrix("self_attn.q_b_proj", self.q_rank, self.width),
            Matrix("self_attn.kv_proj", hidden, dim, 1),
            Matrix("self_attn.o_a_proj", self.width, self.out_rank),
            Matrix("self_attn.o_b_proj", self.out_groups * self.out_rank, hidden),
        ]
        if self.ratio:
            for name in ("kv_proj", "gate_proj"):
                made.append(Matrix(f"self_attn.compressor.{name}", hidden, self._streams * dim, 1))
        if self.indexer:
            index = self.indexer
            for name in ("kv_proj", "gate_proj"):
                made.append(Matrix(f"self_attn.compressor.indexer.{name}", hidden, 2 * index.head_dim, 1))
            made.append(Matrix("self_attn.compressor.indexer.q_b_proj", self.q_rank, index.heads * index.head_dim, 1))
            made.append(Matrix("self_attn.compressor.indexer.weights_proj", hidden, index.heads, 1))
        return tuple(made)

    def vectors(self, hidden: int, tp: int = 1) -> float:
        found = self.q_rank + self.head_dim + self.heads / tp
        if self.ratio:
            found += self.ratio * self._streams * self.head_dim + self.head_dim
        if self.indexer:
            found += self.ratio * 2 * self.indexer.head_dim + self.indexer.head_dim
        return found

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        """The window and the compressed vectors. This excludes the compressor's buffer of uncompressed tokens, which
        has at most twice `ratio` tokens.
        """
        packed = self.head_dim + _PACKED
        found = [Retained(self.head_dim, reach=Reach(self.window), least=packed)]
        if self.ratio:
            found.append(Retained(self.head_dim / self.ratio, least=packed / self.ratio))
        if self.indexer:
            found.append(Retained(plain=self.indexer.key_bytes / self.ratio))
        return tuple(found)

    def reads(self, tp: int = 1) -> tuple[Read, ...]:
        flops = 4 * self.heads / tp * self.head_dim
        found = [Read(self.head_dim, flops, flops, Reach(self.window))]
        if self.ratio:
            reach = Reach(self.indexer.topk * self.ratio) if self.indexer else Reach()
            found.append(Read(self.head_dim / self.ratio, flops / self.ratio, flops / self.ratio, reach))
        if self.indexer:
            found.append(self.indexer.read(self.ratio))
        return tuple(found)

    def products(self, hidden: int, tp: int) -> Products:
        first: float = self.q_rank + self.head_dim * (1 + (2 * self._streams if self.ratio else 0))
        queries = self.width / tp
        if self.indexer:
            first += 4 * self.indexer.head_dim + self.indexer.heads
            queries += self.indexer.heads * self.indexer.head_dim
        low = self.out_groups * self.out_rank / tp
        return ((hidden, first), (self.q_rank, queries), (self.width / self.out_groups, low), (low, hidden))

    def decompressed(self, tp: int) -> tuple[float, float] | None:
        return None

    @property
    def token_flops(self) -> float:
        return 0.0

    def saved(self, tp: Array) -> Array:
        found: Array = (
            3 * self.width / tp + 2.0 * self.q_rank + 2.0 * self.head_dim + self.out_groups * self.out_rank / tp
        )
        return found

    def ring(self, tp: Array) -> Array:
        found: Array = self.head_dim + 0.0 * tp
        return found

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def tp_refusal(self, tp: int) -> str | None:
        return heads_refusal(tp, self.heads, self.heads)
