"""Storage of the matrices of a model's layers: the type of their numbers, and the matrices that keep 16 bits.

Invariant: a format covers every matrix of every layer. Embeddings, the output head, norms and routers always have 16
bits. Scales of groups are counted; scales of whole matrices, channels or square blocks are negligible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# Type in which tensor cores multiply. With bf16, weights are converted when they are read, as in vLLM's Marlin kernels.
Product = Literal["bf16", "fp8", "int8", "fp4"]
MatrixKind = Literal["attention", "dense", "shared", "experts"]
MATRIX_KINDS: tuple[MatrixKind, ...] = ("attention", "dense", "shared", "experts")
_PLAIN_BITS = 16


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """Numbers of `bits` bits. Each group of `group` numbers shares `scale_bits` bits for a scale and perhaps a zero
    point.
    """

    bits: int
    group: int = 1
    scale_bits: int = 0

    @property
    def bytes(self) -> float:
        """Bytes per number, including its part of the scale."""
        return (self.bits + self.scale_bits / self.group) / 8


@dataclass(frozen=True, slots=True)
class KeptShares:
    """Share of the parameters of each kind of matrix that keeps 16 bits, from 0 to 1."""

    attention: float = 0.0
    dense: float = 0.0  # MLPs of layers without experts
    shared: float = 0.0  # experts that all tokens pass
    experts: float = 0.0  # routed experts

    @property
    def only_experts(self) -> bool:
        """Whether only routed experts are stored in fewer bits."""
        return self.attention == self.dense == self.shared == 1

    def of(self, kind: MatrixKind) -> float:
        return float(getattr(self, kind))


@dataclass(frozen=True, slots=True)
class KindFormat:
    """Number format of one kind of matrix that differs from the other kinds."""

    kind: MatrixKind
    number: NumberFormat
    product: Product = "bf16"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of stored weights. `name` is vLLM's name for it, if vLLM has one."""

    name: str
    number: NumberFormat
    product: Product = "bf16"
    kept: KeptShares = field(default=KeptShares())
    block: int = 0  # width of square blocks that share a scale, which tensor parallelism must not divide; 0: none
    kv_cache_dtype: str = "auto"  # type of KV that the checkpoint requests
    own: tuple[KindFormat, ...] = ()  # formats of the kinds of matrices that differ

    @property
    def whole(self) -> bool:
        """Whether all matrices of a layer have the same number format, and none keeps 16 bits."""
        return self.kept == KeptShares() and not self.own

    @property
    def described(self) -> str:
        """The name, and the kinds of matrices with other numbers or with 16 bits."""
        kept = [kind for kind in MATRIX_KINDS if self.kept.of(kind)]
        parts = [kind if self.kept.of(kind) == 1 else f"{100 * self.kept.of(kind):.0f} % of {kind}" for kind in kept]
        inside = [f"{it.kind} of {it.number.bits} bits" for it in self.own if self.kept.of(it.kind) < 1]
        inside += [f"{', '.join(parts)} in 16 bits"] if kept else []
        return f"{self.name} ({'; '.join(inside)})" if inside else self.name

    def product_of(self, kind: MatrixKind) -> Product:
        """Type in which matrices of this kind are multiplied."""
        return next((it.product for it in self.own if it.kind == kind), self.product)

    def bytes_of(self, kind: MatrixKind) -> float:
        """Mean bytes of a weight of this kind."""
        kept, number = self.kept.of(kind), next((it.number for it in self.own if it.kind == kind), self.number)
        return kept * _PLAIN_BITS / 8 + (1 - kept) * number.bytes


BF16 = WeightFormat("bf16", NumberFormat(_PLAIN_BITS))
