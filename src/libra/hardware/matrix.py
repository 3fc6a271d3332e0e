"""Matrices of a layer, and their division over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix. `name` is that of its module within the layer, as in Hugging Face checkpoints."""

    name: str
    inputs: int
    outputs: int
    shards: int = 0  # most devices that can divide it; further devices repeat a part. 0: any number of devices can
    bias: bool = False  # of the outputs, and divided like them

    @property
    def size(self) -> int:
        """Parameters without the bias."""
        return self.inputs * self.outputs

    def parameters(self, tp: int = 1) -> float:
        """Parameters on one of `tp` devices, with the bias."""
        whole = self.size + (self.outputs if self.bias else 0)
        return whole / (min(tp, self.shards) if self.shards else tp)


def parameters(matrices: Iterable[Matrix], tp: int = 1) -> float:
    """Parameters of all `matrices` on one of `tp` devices."""
    return sum(matrix.parameters(tp) for matrix in matrices)


def heads_refusal(tp: int, heads: int, kv_heads: int) -> str | None:
    """Reason why `tp` devices cannot divide these heads; None if they can."""
    if heads % tp:
        return f"tp is {tp}; it must divide the {heads} heads"
    if kv_heads % tp and tp % kv_heads:
        return f"tp is {tp}; it must divide the {kv_heads} KV heads or be a multiple of them"
    return None
