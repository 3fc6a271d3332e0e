"""Grouped-query attention, and the indexer that chooses keys.

Invariant: an attention has a possible shape, and as many parameters as in the checkpoint. Methods return sizes of one
layer on one of `tp` devices, for a degree that `tp_refusal` accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from libra.hardware.checks import require_at_least
from libra.hardware.context import ALL, Array, Reach, Read, Retained
from libra.hardware.matrix import Matrix, heads_refusal

Products = tuple[tuple[float, float], ...]  # (inputs, outputs) of each matrix product for a token


@dataclass(frozen=True, slots=True)
class Indexer:
    """Small heads that choose the `topk` keys that a layer's attention reads (DeepSeek-V3.2, MiniMax-M3).

    Every device has the whole indexer. A key takes one byte per number, and four bytes of scale per 128 numbers.
    """

    heads: int
    head_dim: int
    topk: int  # tokens
    weighted: bool = True  # whether a projection of its own weights the heads

    def __post_init__(self) -> None:
        require_at_least(1, heads=self.heads, head_dim=self.head_dim, topk=self.topk)

    @property
    def key_bytes(self) -> float:
        return self.head_dim + 4 * -(-self.head_dim // 128) if self.weighted else 2.0 * self.head_dim

    def matrices(self, queries: int, hidden: int) -> tuple[Matrix, ...]:
        """The indexer's matrices; the queries that it reads have `queries` numbers."""
        found = (
            Matrix("self_attn.indexer.wq_b", queries, self.heads * self.head_dim, 1),
            Matrix("self_attn.indexer.wk", hidden, self.head_dim, 1),
        )
        return (*found, Matrix("self_attn.indexer.weights_proj", hidden, self.heads, 1)) if self.weighted else found

    @property
    def vectors(self) -> int:
        return 2 * self.head_dim  # weight and bias of the key's norm, or a norm of queries and a norm of keys

    def read(self, each: int = 1) -> Read:
        """Read of the indexer's keys, one key for every `each` tokens."""
        flops = 2 * self.heads * self.head_dim / each
        return Read(0.0, flops, flops, plain=self.key_bytes / each)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int = 0  # of values; 0: equal to `head_dim`
    reach: Reach = ALL
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "layer"] = "none"  # width of the norms of queries and keys: one head, or all heads
    sinks: bool = False  # whether each head has a learned logit without a value
    gate: Literal["none", "head", "channel"] = "none"  # output gate: one number per head, or one per value
    keys_are_values: bool = False  # whether values have no projection of their own
    shared: bool = False  # whether it reads keys and values of an earlier layer
    indexer: Indexer | None = None
    kind: Literal["attention"] = "attention"

    def __post_init__(self) -> None:
        require_at_least(1, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        require_at_least(0, value_dim=self.value_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}; it must divide the {self.heads} heads")

    @property
    def value(self) -> int:
        """Width of a value."""
        return self.value_dim or self.head_dim

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        made = [Matrix("self_attn.q_proj", hidden, self.heads * self.head_dim, bias=self.qkv_bias)]
        if not self.shared:
            keys, values = self.kv_heads * self.head_dim, self.kv_heads * self.value
            made.append(Matrix("self_attn.k_proj", hidden, keys, self.kv_heads, self.qkv_bias))
            if not self.keys_are_values:
                made.append(Matrix("self_attn.v_proj", hidden, values, self.kv_heads, self.qkv_bias))
        made.append(Matrix("self_attn.o_proj", self.heads * self.value, hidden))
        if self.gate == "channel":  # part of the queries' matrix
            made.append(Matrix("self_attn.q_proj", hidden, self.heads * self.value))
        elif self.gate == "head":
            made.append(Matrix("self_attn.g_proj", hidden, self.heads))
        return (*made, *(self.indexer.matrices(hidden, hidden) if self.indexer else ()))

    def vectors(self, hidden: int, tp: int = 1) -> float:
        """Number of parameters other than the matrices and their biases."""
        norms = 0.0
        if self.qk_norm == "head":
            norms = self.head_dim * (1 if self.shared else 2)
        elif self.qk_norm == "layer":
            norms = self.head_dim * (self.heads / tp + self.kv_heads / min(tp, self.kv_heads))
        return (
            norms
            + (hidden if self.out_bias else 0)
            + (self.heads / tp if self.sinks else 0)
            + (self.indexer.vectors if self.indexer else 0)
        )

    def held_heads(self, tp: int = 1) -> float:
        """KV heads on each device; at least 1, even if there are more devices than heads."""
        return max(1.0, self.kv_heads / tp)

    def kept(self, tp: int = 1) -> tuple[Retained, ...]:
        if self.shared:
            return ()
        own = Retained(self.held_heads(tp) * (self.head_dim + self.value), reach=self.reach)
        return (own, Retained(plain=self.indexer.key_bytes)) if self.indexer else (own,)

    def reads(self, tp: int = 1) -> tuple[Read, ...]:
        flops = 2 * self.heads / tp * (self.head_dim + self.value)
        numbers = self.held_heads(tp) * (self.head_dim + self.value)
        if self.indexer is None:
            return (Read(numbers, flops, flops, self.reach),)
        return (Read(numbers, flops, flops, Reach(self.indexer.topk)), self.indexer.read())

    def products(self, hidden: int, tp: int) -> Products:
        keys = (
            0.0 if self.shared else self.held_heads(tp) * (self.head_dim + (0 if self.keys_are_values else self.value))
        )
        gate = {"none": 0, "head": 1, "channel": self.value}[self.gate]
        first = self.heads / tp * (self.head_dim + gate) + keys
        if self.indexer:
            first += (self.indexer.heads + 1) * self.indexer.head_dim
        return ((hidden, first), (self.heads / tp * self.value, hidden))

    def decompressed(self, tp: int) -> tuple[float, float] | None:
        return None

    @property
    def token_flops(self) -> float:
        return 0.0

    def saved(self, tp: Array) -> Array:
        """Activations of a token for its backward pass, without the layer's inputs and norms."""
        query, value = self.heads * self.head_dim / tp, self.heads * self.value / tp
        key = self.kv_heads * (self.head_dim + self.value) / np.minimum(tp, self.kv_heads)
        normed = query + self.kv_heads * self.head_dim / np.minimum(tp, self.kv_heads) if self.qk_norm != "none" else 0
        found: Array = query + value + key + normed
        return found

    def ring(self, tp: Array) -> Array:
        """Numbers of a token's key and value that context parallelism sends around its ring."""
        found: Array = (self.head_dim + self.value) * np.maximum(1.0, self.kv_heads / tp)
        return found

    @property
    def width(self) -> int:
        """Total width of the heads, which tensor parallelism divides."""
        return self.heads * self.head_dim

    def tp_refusal(self, tp: int) -> str | None:
        return heads_refusal(tp, self.heads, self.kv_heads)
